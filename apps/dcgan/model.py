"""The two networks of a deep convolutional GAN, for square images of any size.

They follow A. Radford, L. Metz and S. Chintala, "Unsupervised Representation Learning with Deep
Convolutional Generative Adversarial Networks", ICLR 2016. Each has one more convolution, of 3x3
at full size, because images of 8x8 pixels can be halved only once.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from chainer_compat.npz import open_npz
from chainermn.files import check_trained

N_LATENT = 100
WEIGHTS = chainer.initializers.Normal(0.02)


class Generator(chainer.Chain):
    """Generator: turns random numbers into images.

    Parameters
    ----------
    channels : int
        1 for gray images, 3 for colored ones.
    size : int
        Height and width of the images, in pixels.
    n_units : int
        Channels of the hidden layer at full size. Each halving of the size doubles them.

    Attributes
    ----------
    settings : array of int64
        The parameters above, which are saved with the weights.
    """

    def __init__(self, channels: int, size: int, n_units: int) -> None:
        super().__init__()
        self.side, widths = pyramid(size, n_units)
        widths.reverse()
        self.add_persistent("settings", np.array([channels, size, n_units]))
        with self.init_scope():
            self.project = L.Linear(
                N_LATENT, widths[0] * self.side**2, nobias=True, initialW=WEIGHTS
            )
            self.double = chainer.ChainList()
            for wide, narrow in pairwise(widths):
                self.double.append(
                    L.Deconvolution2D(wide, narrow, 4, 2, 1, nobias=True, initialW=WEIGHTS)
                )
            self.normalize = chainer.ChainList(*map(L.BatchNormalization, widths))
            self.draw = L.Convolution2D(n_units, channels, 3, pad=1, initialW=WEIGHTS)

    def forward(self, latents: chainer.Variable) -> chainer.Variable:
        """Return images.

        Parameters
        ----------
        latents : chainer.Variable or array
            Random numbers from `draw_latents`, of shape (n, `N_LATENT`).

        Returns
        -------
        chainer.Variable
            Images of shape (n, channels, size, size), from -1 for black to 1 for white.
        """
        h = F.reshape(self.project(latents), (len(latents), -1, self.side, self.side))
        h = F.relu(self.normalize[0](h))
        for double, normalize in zip(self.double, self.normalize[1:], strict=True):
            h = F.relu(normalize(double(h)))
        return F.tanh(self.draw(h))


class Discriminator(chainer.Chain):
    """Discriminator: tells real images from generated ones. For parameters, see `Generator`."""

    def __init__(self, channels: int, size: int, n_units: int) -> None:
        super().__init__()
        side, widths = pyramid(size, n_units)
        with self.init_scope():
            self.look = L.Convolution2D(channels, n_units, 3, pad=1, initialW=WEIGHTS)
            self.halve = chainer.ChainList()
            for narrow, wide in pairwise(widths):
                self.halve.append(
                    L.Convolution2D(narrow, wide, 4, 2, 1, nobias=True, initialW=WEIGHTS)
                )
            self.normalize = chainer.ChainList(*map(L.BatchNormalization, widths[1:]))
            self.judge = L.Linear(widths[-1] * side**2, 1, initialW=WEIGHTS)

    def forward(self, images: chainer.Variable) -> chainer.Variable:
        """Return a score per image, of shape (n, 1): positive if it looks real."""
        h = F.leaky_relu(self.look(images))
        for halve, normalize in zip(self.halve, self.normalize, strict=True):
            h = F.leaky_relu(normalize(halve(h)))
        return self.judge(h)


def pyramid(size: int, n_units: int) -> tuple[int, list[int]]:
    """Return the side of the smallest hidden layer, and the channels of all, largest side first.

    For images of 8, 28 and 32 pixels the smallest side is 4, 7 and 4.
    """
    widths = [n_units]
    while size > 4 and size % 2 == 0:
        size //= 2
        widths.append(2 * widths[-1])
    return size, widths


def weights_of(channels: int, size: int, n_units: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the largest arrays of a generator."""
    side, widths = pyramid(size, n_units)
    widths.reverse()
    yield "project/W", (widths[0] * side**2, N_LATENT)
    for i, pair in enumerate(pairwise(widths)):
        yield f"double/{i}/W", (*pair, 4, 4)
    yield "draw/W", (channels, n_units, 3, 3)


def draw_latents(n: int, xp: ModuleType = np) -> np.ndarray:
    """Draw input for `Generator`, from the global random generator of NumPy or CuPy."""
    dtype = chainer.get_dtype(map_mixed16=np.float16)
    return xp.random.standard_normal((n, N_LATENT)).astype(dtype)


def generate(generator: Generator, latents: np.ndarray) -> np.ndarray:
    """Return images as they are saved, without training.

    Parameters
    ----------
    generator : Generator
    latents : array, shape (n, N_LATENT)
        Random numbers of any dtype, on the device of the generator.

    Returns
    -------
    array of uint8, shape (n, channels, size, size)
        Images in host memory.
    """
    latents = latents.astype(generator.project.W.dtype)
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        pixels = chainer.backends.cuda.to_cpu(generator(latents).array)
    return np.rint((pixels.astype(np.float32) + 1) * 127.5).astype(np.uint8)


def load_generator(path: Path, expected: tuple[int, ...] | None = None) -> Generator:
    """Load a generator from a file of its weights.

    Parameters
    ----------
    path : Path
    expected : (int, int), optional
        Channels and size that its images should have.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or does not have the weights of such a generator.
    """
    check_trained(path, __file__)
    try:
        with open_npz(path) as saved:
            settings = saved.read_for("settings", np.zeros(3, np.int64)).tolist()
            # A file of a few bytes cannot ask for a network that fills the memory.
            headers = ((saved.header(name), shape) for name, shape in weights_of(*settings))
            if any(h.shape != shape or h.dtype.hasobject for h, shape in headers):
                raise ValueError(f"its weights are not those of settings {settings}")
            generator = Generator(*settings)
            chainer.serializers.NpzDeserializer(saved).load(generator)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a generator ({error})") from None
    found = tuple(generator.settings[:2].tolist())
    if expected not in (None, found):
        raise ValueError(
            f"{path} draws images of {found} channels and pixels a side, the data has {expected}"
        )
    return generator
