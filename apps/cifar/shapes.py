"""Drawings of ten shapes, in the format of CIFAR-10: color images of 32x32 pixels."""

import math

import numpy as np
from PIL import Image, ImageDraw

Points = list[tuple[float, float]]

SIDE = 32
# Drawn larger, then reduced, so that edges are smooth.
SCALE = 3


def polygon(corners: int, radius: float = 1) -> Points:
    """Return a regular polygon around the origin."""
    angles = (2 * math.pi * k / corners for k in range(corners))
    return [(radius * math.sin(angle), -radius * math.cos(angle)) for angle in angles]


def star() -> Points:
    """Return a star of five points."""
    pairs = zip(polygon(10), polygon(10, 0.45), strict=True)
    return [inner if k % 2 else outer for k, (outer, inner) in enumerate(pairs)]


def cross(bar: float) -> Points:
    """Return a cross with bars of half the width `bar`."""
    ends = [(-bar, -1), (bar, -1), (bar, -bar), (1, -bar), (1, bar), (bar, bar)]
    return ends + [(-x, -y) for x, y in ends]


def heart() -> Points:
    """Return a heart, from a well-known curve of sines and cosines."""
    return [
        (math.sin(a) ** 3, -(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a)) / 16)
        for a in np.linspace(0, 2 * math.pi, 40)
    ]


def crescent() -> Points:
    """Return a circle that another circle partly covers."""
    outer = [(math.cos(a), math.sin(a)) for a in np.linspace(0.9, 2 * math.pi - 0.9, 30)]
    inner = [(0.45 + 0.8 * math.cos(a), 0.8 * math.sin(a)) for a in np.linspace(4.92, 1.36, 30)]
    return outer + inner


# Outlines of each shape; a second one is a hole. No shape becomes another if mirrored or turned.
SHAPES: dict[str, list[Points]] = {
    "arrow": [[(0, -1), (0.8, 0), (0.3, 0), (0.3, 1), (-0.3, 1), (-0.3, 0), (-0.8, 0)]],
    "circle": [polygon(40)],
    "crescent": [crescent()],
    "cross": [cross(0.3)],
    "heart": [heart()],
    "pentagon": [polygon(5)],
    "ring": [polygon(40), polygon(40, 0.6)],
    "square": [polygon(4)],
    "star": [star()],
    "triangle": [polygon(3)],
}
CLASSES = list(SHAPES)


def draw(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw shapes of random color, size, place and angle, with lines across them, and noise.

    Parameters
    ----------
    n : int
        Number of images.
    seed : int
        The same seed draws the same images.

    Returns
    -------
    images : array of uint8, shape (n, 3, 32, 32)
    labels : array of int32, shape (n,)
        Indices of `CLASSES`, each about equally often.
    """
    random = np.random.RandomState(seed)
    labels = random.permutation(np.arange(n, dtype=np.int32) % len(CLASSES))
    images = np.stack([_draw(SHAPES[CLASSES[label]], random) for label in labels])
    return images, labels


def _draw(outlines: list[Points], random: np.random.RandomState) -> np.ndarray:
    size = SIDE * SCALE
    corners = Image.fromarray(_dull(random, (2, 2)).astype(np.uint8))
    background = corners.resize((size, size), Image.Resampling.BILINEAR)
    color = random.permutation([random.randint(60), random.randint(256), random.randint(196, 256)])

    mask = Image.new("L", (size, size))
    radius = size * random.uniform(0.18, 0.42)
    middle = random.uniform(radius, size - radius, 2)
    angle = random.uniform(-0.6, 0.6)
    sine, cosine = radius * math.sin(angle), radius * math.cos(angle)
    turn = np.array([[cosine, sine], [-sine, cosine]])
    for fill, outline in zip((255, 0), outlines, strict=False):
        corners = np.array(outline) @ turn + middle
        ImageDraw.Draw(mask).polygon([tuple(corner) for corner in corners.tolist()], fill=fill)
    background.paste(tuple(color.tolist()), mask=mask)

    pen = ImageDraw.Draw(background)
    for _ in range(random.randint(5)):
        ends, color = random.uniform(0, size, 4).tolist(), _dull(random, ()).tolist()
        pen.line(ends, fill=tuple(color), width=random.randint(2, 2 * SCALE + 1))
    noise = random.normal(0, 16, (SIDE, SIDE, 3))
    pixels = np.clip(np.asarray(background.reduce(SCALE)) + noise, 0, 255)
    return pixels.astype(np.uint8).transpose(2, 0, 1)


def _dull(random: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
    """Return colors close to gray, of shape (*shape, 3)."""
    return random.randint(40, 200, (*shape, 1)) + random.randint(0, 50, (*shape, 3))
