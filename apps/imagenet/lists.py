"""Lists of image files and their classes."""

import codecs
import hashlib
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np

import images
from chainermn.datasets.folders import LEAST_SHARE
from chainermn.files import open_regular, read_lines

# A list with more is taken for a mistake, before memory is allocated for its network.
MOST_CLASSES = 100_000
# Bytes of a line in a list: no path has more than 4096, and int() takes as many digits.
LONGEST_LINE = 4200


class ImageList:
    """Paths of images, relative to a folder, and their classes.

    Four arrays hold them, so that 1.3 million take 55 MB and are quickly sent to ranks
    and workers.

    Parameters
    ----------
    paths : sequence of str or bytes
    labels : sequence of int
        Their classes.
    confined : bool
        Whether paths must stay in the folder that they start from.
    source : str
        File with one line per image, for error messages.
    lines : array of int, optional
        Number of each image's line, from 1.
    """

    def __init__(
        self,
        paths: Sequence[str | bytes],
        labels: Sequence[int],
        confined: bool = True,
        source: str = "",
        lines: np.ndarray | None = None,
    ) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self.text = np.frombuffer(b"".join(encoded), np.uint8)
        self.ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)
        self.labels = np.array(labels, np.int32)
        self.lines = np.arange(1, len(encoded) + 1, dtype=np.int32) if lines is None else lines
        self.confined, self.source = confined, source

    @classmethod
    def read(cls, path: str | Path, root: str | Path | None = None) -> "ImageList":
        """Read a list with one line ``path label`` per image; see `parse`.

        Raises
        ------
        OSError, ValueError
        """
        with open_regular(path) as file:
            return cls.parse(read_lines(file, path, LONGEST_LINE), path, root)

    @classmethod
    def parse(
        cls, lines: Iterable[bytes], source: str | Path, root: str | Path | None = None
    ) -> "ImageList":
        """Return the images that the lines of a list name.

        Parameters
        ----------
        lines : iterable of bytes
        source : path
            Name of the list in errors.
        root : path, optional
            Folder that no path may lead out of. Only links to folders are followed here, because
            looking at each file would take minutes on a network disk. `Images` does so when it
            opens a file.

        Raises
        ------
        ValueError
            If a line has another form or leads out of the folder, if a path has two labels, or if
            there are no lines.
        """
        names, labels, folders = list[bytes](), list[int](), set()
        root = None if root is None else Path(root).resolve()
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            rest = line.rstrip(b" \t\r\n")
            name, _, label = rest.rpartition(b" ")
            if not label.isdigit():
                name, _, label = rest.rpartition(b"\t")
            name = name.rstrip(b" \t")
            if not name or not label.isdigit() or b"\0" in name:
                hint = ""
                if b"\0" in line:
                    hint = "; if it is UTF-16, iconv -f UTF-16 -t UTF-8 FILE > NEW converts it"
                got = f"got {line!r:.200}{hint}"
                raise ValueError(f"{source}:{number}: expected 'path label', {got}")
            names.append(name)
            labels.append(int(label))
            if labels[-1] >= MOST_CLASSES:
                expected = f"less than lists.MOST_CLASSES = {MOST_CLASSES}"
                raise ValueError(
                    f"{source}:{number}: expected a class {expected}, got {os.fsdecode(label)}"
                )
            folder = name[: name.rfind(b"/") + 1]
            if folder not in folders:
                if root and images.leads_out(os.fsdecode(folder), root):
                    reason = f"{os.fsdecode(name)!a} leads out of {root}; {images.HINT}"
                    raise ValueError(f"{source}:{number}: {reason}")
                folders.add(folder)
        if not names:
            raise ValueError(f"{source}: names no image")
        listed = cls(names, labels, root is not None, str(source))
        listed.count_shared(listed, root)
        return listed

    @property
    def n_classes(self) -> int:
        """The smallest possible number of classes."""
        return int(self.labels.max()) + 1

    @property
    def repeated(self) -> int:
        """Number of images with a path that an earlier one has, too."""
        return len(self) - len(set(self.paths()))

    def digest(self) -> str:
        """Return a digest of this list."""
        found = hashlib.sha256(self.text.tobytes())
        found.update(self.ends.tobytes() + self.labels.tobytes())
        return found.hexdigest()[:16]

    def content(self) -> bytes:
        """Return the content of a file from which `read` makes the same list."""
        pairs = (self[i] for i in range(len(self)))
        lines = b"".join(b"%b %d\n" % (os.fsencode(path), label) for path, label in pairs)
        # Or a mark that belongs to the first path would be lost.
        return codecs.BOM_UTF8 * lines.startswith(codecs.BOM_UTF8) + lines

    def take(self, numbers: Iterable[int]) -> "ImageList":
        """Return a list of some of the images."""
        numbers = np.fromiter(numbers, np.int64)
        paths = [self[i][0] for i in numbers]
        labels, lines = self.labels[numbers], self.lines[numbers]
        return ImageList(paths, labels, self.confined, self.source, lines)

    def without(self, unreadable: Collection[int]) -> "ImageList":
        """Return the list without the images that cannot be read.

        Raises
        ------
        OSError
            If none is left.
        """
        if not unreadable:
            return self
        left = [i for i in range(len(self)) if i not in unreadable]
        if not left:
            raise OSError(f"{self.source}: none of its images can be read")
        return self.take(left)

    def paths(self, root: str | Path | None = None) -> list[bytes]:
        """Return all paths without what does not change them, such as ``./``.

        Parameters
        ----------
        root : path, optional
            Folder that they start from: absolute paths in it become relative ones.
        """
        text = self.text.tobytes()
        begins = [0, *self.ends[:-1].tolist()]
        found = [text[b:e] for b, e in zip(begins, self.ends.tolist(), strict=True)]
        if b"./" not in text and b"//" not in text and (self.text[begins] != ord("/")).all():
            return found
        start = None if root is None else os.fsencode(Path(root).resolve())
        folders = dict[bytes, bytes]()

        def plain(path: bytes) -> bytes:
            if start is not None and (path.startswith(b"/") or b"../" in path):
                folder, name = os.path.split(path)
                if folder not in folders:  # following a path takes long
                    real = os.path.realpath(os.path.join(start, folder))
                    folders[folder] = os.path.relpath(real, start)
                path = os.path.join(folders[folder], name)
            return os.path.normpath(path)

        return list(map(plain, found))

    def count_shared(self, other: "ImageList", root: str | Path | None = None) -> int:
        """Return how many different paths, which start from a folder, another list has, too.

        Raises
        ------
        ValueError
            If one of them has another label there.
        """
        mine, others = self.paths(root), other.paths(root)
        shared = set(mine)
        if other is not self:
            shared.intersection_update(others)
        if not shared or (other is self and len(shared) == len(self)):
            return len(shared)
        first = {path: i for i, path in reversed(list(enumerate(others))) if path in shared}
        for i, path in enumerate(mine):
            if path in shared and self.labels[i] != other.labels[j := first[path]]:
                raise ValueError(
                    f"{self.where(i)}: {os.fsdecode(path)!a} has label {self.labels[i]} here, and "
                    f"{other.labels[j]} in {other.where(j)}: delete the wrong line"
                )
        return len(shared)

    def hardly_left(self, left: "ImageList") -> list[tuple[int, int, int]]:
        """Return the classes of which another list has less than a tenth of the images.

        For each, this is the label, and how many images the other list and this one have.
        """
        n_classes = self.n_classes
        before, after = (np.bincount(part.labels, minlength=n_classes) for part in (self, left))
        few = np.flatnonzero(after < LEAST_SHARE * before)
        return [(int(label), int(after[label]), int(before[label])) for label in few]

    def where(self, i: int) -> str:
        """Return the line of an image, for errors; empty if the list is from no file."""
        return self.source and f"{self.source}:{self.lines[i]}"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[str, int]:
        begin = self.ends[i - 1] if i else 0
        path = os.fsdecode(self.text[begin : self.ends[i]].tobytes())
        return path, int(self.labels[i])
