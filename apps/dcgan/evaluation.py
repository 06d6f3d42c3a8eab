"""The distance between generated and real images, as one number.

It is the Frechet distance of M. Heusel et al., "GANs Trained by a Two Time-Scale Update Rule
Converge to a Local Nash Equilibrium", NIPS 2017. There, a large network that knows photographs
describes the images. Here, a small one does, which is trained on the data at hand, in float32
whatever the dtype of the generator is. So compare the numbers only for the same data.
"""

from pathlib import Path
from typing import Any, NamedTuple

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn
from chainermn.files import atomic_write
from data import digest, to_pixels
from model import N_LATENT, Generator, generate

N_FEATURES = 32
N_GENERATED, BATCHSIZE = 1000, 100
DISTANCE = "validation/distance"


class FeatureNetwork(chainer.Chain):
    """Tells by how many quarter turns an image was rotated; its hidden layer describes images.

    To learn that, it has to know what is in the images, but needs no labels: S. Gidaris, P. Singh
    and N. Komodakis, "Unsupervised Representation Learning by Predicting Image Rotations", ICLR
    2018.

    Parameters
    ----------
    channels, size : int
        Number of channels, and height and width, of the images.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        # Its own random numbers, so those of training do not depend on whether this is trained.
        weights = chainer.initializers.LeCunNormal(rng=np.random.RandomState(0))
        side = -(-size // 4)
        with self.init_scope():
            self.conv1 = L.Convolution2D(channels, 16, 3, pad=1, initialW=weights)
            self.conv2 = L.Convolution2D(16, 32, 3, pad=1, initialW=weights)
            self.features = L.Linear(32 * side**2, N_FEATURES, initialW=weights)
            self.turns = L.Linear(N_FEATURES, 4, initialW=weights)

    def forward(self, pixels: Any) -> chainer.Variable:
        """Return features, of shape (n, `N_FEATURES`), from what ``to_pixels`` returns."""
        h = F.max_pooling_2d(F.relu(self.conv1(pixels)), 2)
        h = F.max_pooling_2d(F.relu(self.conv2(h)), 2)
        return F.relu(self.features(h))

    def describe(self, images: np.ndarray) -> np.ndarray:
        """Return the features of images of uint8, in float64."""
        found = []
        with chainer.no_backprop_mode(), chainer.using_config("dtype", np.float32):
            for i in range(0, len(images), BATCHSIZE):
                pixels = to_pixels(images[i : i + BATCHSIZE], self.device)
                found.append(chainer.backends.cuda.to_cpu(self(pixels).array))
        return np.concatenate(found).astype(np.float64)


def train_features(images: np.ndarray, steps: int = 500, batchsize: int = 64) -> FeatureNetwork:
    """Train a network to tell which way up images are; the result is always the same.

    Parameters
    ----------
    images : array of uint8, shape (n, channels, size, size)
    steps, batchsize : int
    """
    random = np.random.RandomState(0)
    network = FeatureNetwork(*images.shape[1:3])
    optimizer = chainer.optimizers.Adam().setup(network)
    for _ in range(steps):
        chosen = images[random.randint(len(images), size=batchsize)]
        turns = random.randint(4, size=batchsize).astype(np.int32)
        turned = [np.rot90(image, n, (1, 2)) for image, n in zip(chosen, turns, strict=True)]
        scores = network.turns(network(to_pixels(turned, network.device)))
        optimizer.update(F.softmax_cross_entropy, scores, turns)
    return network


def load_features(folder: Path, images: np.ndarray) -> FeatureNetwork:
    """Load the network for these images from a folder, or train and save it.

    It is kept because training on another processor, or with other threads, rounds differently.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read or written.
    """
    path = folder / f"features-{digest(images)}.npz"
    if not path.exists():
        network = train_features(images)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, "wb") as file:
            chainer.serializers.save_npz(file, network)
        return network
    network = FeatureNetwork(*images.shape[1:3])
    try:
        chainer.serializers.load_npz(path, network)
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be used ({error}). Delete it, and the next run makes a new one"
        ) from None
    return network


class Gaussian(NamedTuple):
    """A normal distribution of features.

    Attributes
    ----------
    mean : array of float64, shape (n_features,)
    covariance : array of float64, shape (n_features, n_features)
    """

    mean: np.ndarray
    covariance: np.ndarray

    @classmethod
    def fit(cls, features: np.ndarray) -> "Gaussian":
        """Return the distribution with the mean and covariance of features, (n, n_features)."""
        return cls(features.mean(axis=0), np.cov(features, rowvar=False))


def frechet_distance(p: Gaussian, q: Gaussian) -> float:
    """Return the squared Frechet distance of two normal distributions.

    D. Dowson and B. Landau, "The Frechet Distance between Multivariate Normal Distributions",
    Journal of Multivariate Analysis 12, 1982. In place of the trace of the root of PQ, this takes
    that of the root of the symmetric matrix sqrt(P) Q sqrt(P), which has the same eigenvalues as
    PQ.
    """
    values, vectors = np.linalg.eigh(p.covariance)
    root = vectors * np.sqrt(values.clip(0)) @ vectors.T
    shared = np.linalg.eigvalsh(root @ q.covariance @ root)
    traces = np.trace(p.covariance) + np.trace(q.covariance)
    return float(np.sum((p.mean - q.mean) ** 2) + traces - 2 * np.sum(np.sqrt(shared.clip(0))))


class Reference(NamedTuple):
    """The reference for the distance of generated images.

    Attributes
    ----------
    network : FeatureNetwork
    real : Gaussian
        Distribution of the features of the validation images.
    distances : dict of float
        Distances of training images and of noise from the validation images. No generator has to
        be better than the first; every generator should be better than the second.
    """

    network: FeatureNetwork
    real: Gaussian
    distances: dict[str, float]


def create_reference(train: np.ndarray, validation: np.ndarray, folder: Path) -> Reference:
    """Train or load the network in a folder, and describe the validation images by it."""
    with chainer.using_config("dtype", np.float32):
        network = load_features(folder, train)
    real = Gaussian.fit(network.describe(validation))
    shape = N_GENERATED, *train.shape[1:]
    noise = np.random.RandomState(0).randint(256, size=shape).astype(np.uint8)
    samples = {"training images": train[:N_GENERATED], "noise": noise}
    distances = {
        name: frechet_distance(Gaussian.fit(network.describe(images)), real)
        for name, images in samples.items()
    }
    return Reference(network, real, distances)


class DistanceEvaluator(chainermn.extensions.GenericMultiNodeEvaluator):
    """Reports, on rank 0, the distance between generated images and the validation images.

    The images are made from the same random numbers each time, and each rank makes some of them.
    So the distance is the same on any number of ranks.

    Parameters
    ----------
    comm : CommunicatorBase
    generator : Generator
    reference : Reference
    device : chainer.backend.Device
    """

    def __init__(
        self,
        comm: chainermn.CommunicatorBase,
        generator: Generator,
        reference: Reference,
        device: chainer.backend.Device,
    ) -> None:
        shape = N_GENERATED // BATCHSIZE, BATCHSIZE, N_LATENT
        latents = np.random.RandomState(0).standard_normal(shape)
        # If a rank takes every size-th batch, results arrive in the same order for any size.
        own = latents[comm.rank :: comm.size]
        iterator = chainer.iterators.SerialIterator(own, 1, repeat=False, shuffle=False)
        super().__init__(comm, iterator, generator, device, _first)
        self.generator, self.reference = generator, reference
        reference.network.to_device(device)

    def calc_local(self, latents: Any) -> np.ndarray:
        """Return the features of the images made from a batch."""
        return self.reference.network.describe(generate(self.generator, latents))

    def aggregate(self, results: list[np.ndarray]) -> float:
        """Report and return the distance."""
        found = Gaussian.fit(np.concatenate(results))
        distance = frechet_distance(found, self.reference.real)
        chainer.report({DISTANCE: distance})
        return distance


@chainer.dataset.converter()
def _first(batches: list[np.ndarray], device: chainer.backend.Device) -> Any:
    return device.send(batches[0])
