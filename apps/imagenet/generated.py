"""A small data set, drawn at first use: ten shapes, colored, textured and rotated, in noise."""

import json
import math
import shutil
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import chainermn
from chainermn.agreement import run_together
from data import Sums
from inspection import index_files
from lists import ImageList

CLASSES = (
    *("circle", "square", "triangle", "pentagon", "star"),
    *("cross", "ring", "crescent", "bars", "heart"),
)
TRAIN, VALIDATION = 3000, 499
SEED = 2012


def provide(root: Path, comm: chainermn.CommunicatorBase) -> None:
    """Draw the data set unless it exists. Collective.

    Rank 0 draws for all ranks; hosts that do not see its files draw their own.

    Parameters
    ----------
    root : path
        Folder that gets ``train.txt``, ``val.txt``, ``classes.txt``, ``mean.json`` and the images.
    comm : CommunicatorBase

    Raises
    ------
    OSError, RuntimeError
        On all ranks, if it cannot be written on any host.
    """

    def draw_if_absent(is_my_turn: bool) -> None:
        if is_my_turn and not root.exists():
            print(f"drawing {TRAIN + VALIDATION} images into {root.resolve()}", flush=True)
            create(root, TRAIN, VALIDATION)

    for is_my_turn in (comm.rank == 0, comm.intra_rank == 0):
        run_together(comm, "drawing images", partial(draw_if_absent, is_my_turn))


def create(root: Path, n_train: int, n_validation: int, seed: int = SEED) -> None:
    """Draw the images into a new folder, which appears only when complete."""
    root = root.resolve()
    root.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    try:
        sums = Sums()
        for part, n in (("train", n_train), ("val", n_validation)):
            (unfinished / part).mkdir()
            lines = []
            for i in range(n):
                label = i % len(CLASSES)
                name = f"{part}/{CLASSES[label]}-{i:05}.jpg"
                random = np.random.default_rng([seed, part == "val", i])
                image, quality = draw(label, random), int(random.integers(60, 96))
                image.save(unfinished / name, quality=quality)
                lines.append(f"{name} {label}\n")
                if part == "train":
                    sums.add(np.asarray(image).transpose(2, 0, 1))
            (unfinished / f"{part}.txt").write_text("".join(lines))
            index_files(ImageList.read(unfinished / f"{part}.txt"), unfinished)
        (unfinished / "classes.txt").write_text("\n".join(CLASSES) + "\n")
        write_statistics(unfinished / "mean.json", sums)
        unfinished.chmod(0o755)
        unfinished.rename(root)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def draw(label: int, random: np.random.Generator) -> Image.Image:
    """Draw a picture of a class, of 48 to 96 pixels per side."""
    size = int(random.integers(48, 97))
    mask = _shape(label, 2 * size, random).resize((size, size), Image.Resampling.LANCZOS)
    alpha = np.asarray(mask, np.float64)[..., None] / 255
    back, front = _colors(random)
    pixels = alpha * _textured(front, size, random) + (1 - alpha) * _textured(back, size, random)
    pixels += random.normal(0, random.uniform(4, 20), pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _shape(label: int, side: int, random: np.random.Generator) -> Image.Image:
    mask = Image.new("L", (side, side))
    radius = side * random.uniform(0.24, 0.42)
    turn = random.uniform(-25, 25)
    room = side / 2 - radius
    x, y = side / 2 + random.uniform(-room, room, 2) * 0.8
    paint = ImageDraw.Draw(mask)

    def around(cx: float, cy: float, r: float) -> tuple[float, float, float, float]:
        return cx - r, cy - r, cx + r, cy + r

    def polygon(radii: list[float], start: float) -> None:
        step = 2 * math.pi / len(radii)
        angles = [math.radians(turn + start) + i * step for i in range(len(radii))]
        paint.polygon(
            [
                (x + r * radius * math.sin(a), y - r * radius * math.cos(a))
                for r, a in zip(radii, angles, strict=True)
            ],
            fill=255,
        )

    def bar(across: float, angle: float, thickness: float) -> None:
        a = math.radians(turn + angle)
        dx, dy = radius * math.cos(a), radius * math.sin(a)
        cx, cy = x - across * dy, y + across * dx
        ends = (cx - dx, cy - dy, cx + dx, cy + dy)
        paint.line(ends, fill=255, width=round(thickness * radius))

    match CLASSES[label]:
        case "circle":
            paint.ellipse(around(x, y, radius), fill=255)
        case "square":
            polygon([1.1] * 4, 45)
        case "triangle":
            polygon([1.1] * 3, 0)
        case "pentagon":
            polygon([1] * 5, 0)
        case "star":
            polygon([1.15, 0.45] * 5, 0)
        case "cross":
            bar(0, 0, 0.5)
            bar(0, 90, 0.5)
        case "ring":
            paint.ellipse(around(x, y, radius), fill=255)
            paint.ellipse(around(x, y, radius * random.uniform(0.45, 0.65)), fill=0)
        case "crescent":
            paint.ellipse(around(x, y, radius), fill=255)
            a = math.radians(turn + random.choice([0, 180]))
            bite = (x + radius * 0.5 * math.cos(a), y + radius * 0.5 * math.sin(a))
            paint.ellipse(around(*bite, radius * 0.85), fill=0)
        case "bars":
            for across in (-0.75, 0, 0.75):
                bar(across, 0, 0.36)
        case "heart":
            points = []
            for i in range(60):
                t = 2 * math.pi * i / 60
                px = 16 * math.sin(t) ** 3
                py = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
                a, s = math.radians(turn), radius / 16
                points.append(
                    (
                        x + s * (px * math.cos(a) + py * math.sin(a)),
                        y + s * (px * math.sin(a) - py * math.cos(a)),
                    )
                )
            paint.polygon(points, fill=255)
    return mask


def _colors(random: np.random.Generator) -> np.ndarray:
    """Return two different colors."""
    while True:
        pair = random.uniform(20, 235, (2, 3))
        if np.linalg.norm(pair[0] - pair[1]) > 110:
            return pair


def _textured(color: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    """Return a square that has about one color, with stripes and a gradient."""
    y, x = np.mgrid[:size, :size] / size - 0.5
    a, b = random.uniform(0, 2 * math.pi, 2)
    stripes = np.sin(random.uniform(5, 60) * (x * math.cos(a) + y * math.sin(a)) + b)
    gradient = x * math.cos(b) + y * math.sin(b)
    light = random.uniform(0, 22) * stripes + random.uniform(0, 60) * gradient
    return color + light[..., None]


def write_statistics(path: Path, sums: Sums) -> None:
    """Write what `data.read_statistics` reads."""
    path.write_text(json.dumps(sums.statistics(), indent=1) + "\n")
