"""Images in tar files, which are read from front to back as network disks like it.

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

INDEX = "index.json"
NO_IMAGES = {"cls", "json", "txt"}
BYTES_READ_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Shards:
    """The tar files of a folder, and how many images each has.

    Parameters
    ----------
    folder : path
    names : list of str
    counts : array of int64
        Images of each.
    sizes : list of int
        Bytes of each.
    n_classes : int
    """

    folder: Path
    names: list[str]
    counts: np.ndarray
    sizes: list[int]
    n_classes: int

    @classmethod
    def read(cls, folder: str | Path) -> "Shards":
        """Read the index of a folder.

        Raises
        ------
        OSError, ValueError
        """
        path = Path(folder, INDEX)
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: pack.py {folder} makes it for tar files")
        try:
            rows = json.loads(path.read_text())
            names, counts, sizes, n_classes = (
                [row[key] for row in rows] for key in ("name", "images", "bytes", "classes")
            )
            return cls(Path(folder), names, np.array(counts, np.int64), sizes, max(n_classes))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: expected an index of shards ({error})") from None

    def __len__(self) -> int:
        return int(self.counts.sum())

    def digest(self) -> str:
        """Return what tells these shards from others: names and sizes."""
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
            Ascending within each shard.

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
            for place, found in zip(places, read_shard(path, places), strict=True):
                yield int(starts[shard]) + place, *found


def read_shard(path: Path, places: Sequence[int]) -> Iterator[tuple[bytes, str, int]]:
    """Yield file, name and class of images of a shard, whose places ascend."""
    left = deque(places)
    try:
        with (
            open(path, "rb", buffering=BYTES_READ_AT_ONCE) as file,
            tarfile.open(fileobj=file, mode="r:") as archive,
        ):
            for place, members in enumerate(_group(archive)):
                if left and place == left[0]:
                    left.popleft()
                    label = int(_content(archive, members["cls"]))
                    image, *_ = (m for ending, m in members.items() if ending not in NO_IMAGES)
                    yield _content(archive, image), f"{path}/{image.name}", label
                if not left:
                    return
            raise ValueError(f"it ends before image {left[0]}")
    except (KeyError, OSError, ValueError, tarfile.TarError) as error:
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


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    return archive.extractfile(member).read()


def write_shard(path: Path, images: Iterable[tuple[str, Path, int]]) -> None:
    """Write a shard of images: their keys, files and classes. Files are taken as they are."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for key, file, label in images:
            ending = file.suffix.lower() or ".jpg"
            for name, content in (
                (f"{key}{ending}", file.read_bytes()),
                (f"{key}.cls", str(label).encode()),
            ):
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
    with tarfile.open(path, "r:") as archive:
        n_images = sum(1 for _ in _group(archive))
    labels = [label for _, _, label in read_shard(path, range(max(n_images, 1)))]
    return {
        "name": path.name,
        "images": n_images,
        "bytes": path.stat().st_size,
        "classes": max(labels) + 1,
    }
