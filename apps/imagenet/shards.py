"""Images in tar files, read from front to back, which is fastest on network disks.

The tar files are in webdataset's format: an image is a file ``KEY.jpg``, or with another ending,
beside ``KEY.cls``, which contains the number of its class.
"""

import hashlib
import io
import itertools
import json
import socket
import tarfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chainermn.datasets.pictures import MOST_BYTES
from chainermn.files import open_regular, open_tar, read_json
from images import open_image
from lists import MOST_CLASSES

INDEX = "index.json"
# Columns of the index.
ROW = {
    "name": str,
    "images": range(1, 1 << 32),
    "bytes": range(1 << 60),
    "classes": range(1, MOST_CLASSES + 1),
}
LEAST = "least"  # the smallest label, which indexes of older releases lack
NO_IMAGES = {"cls", "json", "txt"}
WHAT_TARFILE_RAISES = tarfile.TarError, OSError, ValueError, MemoryError, RecursionError
BYTES_READ_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Shards:
    """The tar files of a folder, and how many images each has.

    Parameters
    ----------
    folder : path
    names : list of str
    counts : array of int64
        Number of images in each file.
    sizes : list of int
        Size of each file in bytes.
    n_classes : int
    least : int
        Smallest label.
    """

    folder: Path
    names: list[str]
    counts: np.ndarray
    sizes: list[int]
    n_classes: int
    least: int = 0

    @classmethod
    def read(cls, folder: str | Path) -> "Shards":
        """Read the index of a folder.

        Raises
        ------
        OSError, ValueError
        """
        path = Path(folder, INDEX)
        if not path.exists():
            hint = f"pack.py {folder} makes it for tar files, prepare.py makes lists of images"
            raise FileNotFoundError(f"{path} is missing: {hint}")
        rows = read_json(path, [ROW])
        for row in rows:
            name, n_images, size = row["name"], row["images"], row["bytes"]
            if name in ("", "..") or name != Path(name).name:
                raise ValueError(f"{path}: expected names of files in this folder, got {name!r}")
            # A tar file has a block for each member and one for its content.
            if n_images * 4 * tarfile.BLOCKSIZE > size:
                raise ValueError(f"{path}: {n_images} images in the {size} bytes of {name}")
        names, counts, sizes, n_classes = ([row[key] for row in rows] for key in ROW)
        if not rows:
            raise ValueError(f"{path}: names no shard")
        is_known = all(type(row.get(LEAST)) is int for row in rows)
        least = min(row[LEAST] for row in rows) if is_known else 0
        return cls(Path(folder), names, np.array(counts, np.int64), sizes, max(n_classes), least)

    @property
    def labels(self) -> list[int]:
        """The smallest and the largest label."""
        return [self.least, self.n_classes - 1]

    def __len__(self) -> int:
        return int(self.counts.sum())

    def digest(self) -> str:
        """Return a digest of these shards: of names and sizes."""
        about = json.dumps([self.names, self.counts.tolist(), self.sizes])
        return hashlib.sha256(about.encode()).hexdigest()[:16]

    def check(self, begin: int = 0, step: int = 1) -> None:
        """Look for every ``step``-th file, from ``begin`` on, and compare its size.

        Raises
        ------
        OSError
        """
        for name, size in list(zip(self.names, self.sizes, strict=True))[begin::step]:
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                has = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise OSError(f"shard {path} {has} on {socket.gethostname()}")

    def read_images(self, numbers: Sequence[int]) -> Iterator[tuple[int, bytes, str, int]]:
        """Yield images, counted through all shards, without opening one twice in sequence.

        Parameters
        ----------
        numbers : sequence of int
            Numbers of the images, ascending within each shard.

        Yields
        ------
        int
            The number.
        bytes
            The file.
        str
            Its name.
        int
            Its class.

        Raises
        ------
        OSError
            If a shard is missing or damaged.
        """
        starts = np.concatenate([[0], np.cumsum(self.counts)])
        shards = np.searchsorted(starts, numbers, "right") - 1
        for shard, group in itertools.groupby(zip(shards, numbers, strict=True), lambda p: p[0]):
            places = [int(number - starts[shard]) for _, number in group]
            path = self.folder / self.names[shard]
            read = read_shard(path, places, self.n_classes)
            for place, found in zip(places, read, strict=True):
                yield int(starts[shard]) + place, *found


def read_shard(
    path: Path, places: Sequence[int], n_classes: int = MOST_CLASSES
) -> Iterator[tuple[bytes, str, int]]:
    """Yield file, name and class of images of a shard, whose places ascend."""
    left = deque(places)
    try:
        with (
            open_regular(path, buffering=BYTES_READ_AT_ONCE) as file,
            open_tar(file) as archive,
        ):
            for place, members in enumerate(_group(archive)):
                if left and place == left[0]:
                    left.popleft()
                    label = int(_content(archive, members["cls"], 20))
                    if not 0 <= label < n_classes:
                        raise ValueError(f"expected a class below {n_classes}, got {label}")
                    image, *_ = (m for ending, m in members.items() if ending not in NO_IMAGES)
                    yield _content(archive, image, MOST_BYTES), f"{path}/{image.name}", label
                if not left:
                    return
            raise ValueError(f"it ends before image {left[0]}")
    except (*WHAT_TARFILE_RAISES, KeyError) as error:
        raise OSError(
            f"shard {path} on {socket.gethostname()} is damaged, or not in webdataset's format "
            f"({type(error).__name__}: {error})"
        ) from None


def _group(archive: tarfile.TarFile) -> Iterator[dict[str, tarfile.TarInfo]]:
    """Yield the members of each image, by what follows the first dot of their names."""

    def key_of(member: tarfile.TarInfo) -> str:
        folder, slash, name = member.name.rpartition("/")
        return folder + slash + name.partition(".")[0]

    files = (member for member in archive if member.isfile())
    for key, members in itertools.groupby(files, key_of):
        yield {member.name[len(key) + 1 :].lower(): member for member in members}


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, most: int) -> bytes:
    # A sparse member has more bytes than the archive.
    if member.size > most or member.issparse():
        raise ValueError(f"{member.name} has {member.size} bytes, at most {most} are expected")
    return archive.extractfile(member).read()


def write_shard(
    path: Path, images: Iterable[tuple[str, Path, int]], root: Path | None = None
) -> None:
    """Write a shard of images: their keys, files and classes. Files are taken as they are.

    If there is a root, which is a folder without links, they must be inside it.
    """
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for key, path_of_image, label in images:
            ending = path_of_image.suffix.lower() or ".jpg"
            with open_image(path_of_image, root) as file:
                image = file.read()
            for name, content in ((f"{key}{ending}", image), (f"{key}.cls", b"%d" % label)):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def describe_shard(path: Path) -> dict[str, Any]:
    """Return what the index says about a shard.

    Raises
    ------
    OSError
        If it has no image, or is not in webdataset's format.
    """
    try:
        with open_regular(path) as file, open_tar(file) as archive:
            n_images = sum(1 for _ in _group(archive))
    except WHAT_TARFILE_RAISES as error:
        raise OSError(f"{path}: {error}") from None
    labels = [label for _, _, label in read_shard(path, range(max(n_images, 1)))]
    return {
        "name": path.name,
        "images": n_images,
        "bytes": path.stat().st_size,
        "classes": max(labels) + 1,
        LEAST: min(labels),
    }
