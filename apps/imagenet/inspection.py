"""Whether the files of lists can be read, and are as prepare.py saw them."""

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import chainer
import numpy as np

import chainermn
import images
from chainermn.agreement import run_together
from chainermn.datasets.names import shown
from chainermn.files import atomic_write, open_regular
from chainermn.global_except_hook import exit_job
from chainermn.progress import Progress
from lists import ImageList
from shards import Shards

Look = Callable[[str, Path | None], object]

SECONDS = 3  # that a training waits for it, before it starts beside it
NAMED = 3  # files in a message; the others are counted
AGAIN = "If the files are as they should be, run prepare.py again"
EVERYWHERE = (
    "Every host must see the images under the same path; --root is what the paths of the lists "
    "start from"
)


def index_path(source: str | Path) -> Path:
    """Return where `write_index` puts what prepare.py knows about the files of a list."""
    return Path(f"{source}.sizes.npy")


def stamp_of(status: os.stat_result) -> tuple[int, int]:
    """Return the size of a file in bytes, and when it was changed, in nanoseconds."""
    return status.st_size, status.st_mtime_ns


def write_index(file: BinaryIO, listed: ImageList, stamps: np.ndarray) -> None:
    """Write sizes and times, int64 of shape (images, 2), after a row with the list's digest."""
    first = np.array([[int(listed.digest(), 16), 0]], np.uint64).view(np.int64)
    np.save(file, np.concatenate([first, stamps]))


def index_files(listed: ImageList, root: str | Path) -> None:
    """Write sizes and times of all files of a list."""
    files = (os.path.join(root, listed[i][0]) for i in range(len(listed)))
    stamps = np.array([stamp_of(os.stat(file)) for file in files], np.int64)
    with atomic_write(index_path(listed.source), "wb") as file:
        write_index(file, listed, stamps)


def read_index(listed: ImageList) -> np.ndarray | None:
    """Return sizes and times as prepare.py saw them; None if it has not seen these files."""
    path = index_path(listed.source)
    try:
        open_regular(path, 16 * len(listed) + 1000).close()
        index = np.lib.format.open_memmap(path, mode="r")
        first, stamps = index[0], index[1:]
    except Exception:  # NumPy's reader of headers raises all kinds of exceptions
        return None
    is_of_list = stamps.shape == (len(listed), 2) and stamps.dtype == np.int64
    digest = int(listed.digest(), 16)
    return np.array(stamps) if is_of_list and first.view(np.uint64)[0] == digest else None


class Inspection(chainer.training.Extension):
    """Looks at the files of lists, in a thread, and ends the job before it validates.

    The size of a file that prepare.py has seen must be the same. If only its time is another,
    as for a copy on another host, or if there is no index, the file's header is read. The ranks of
    a host share its files, because each host may see others.

    Parameters
    ----------
    looks : sequence of (ImageList or Shards, callable)
        ``look(path, root)`` raises if a file of the list cannot be read. Nothing is done for
        shards.
    root : path
        Folder that their paths start from.
    comm : CommunicatorBase
    skip : bool
        Whether to leave out files that are missing, changed or unreadable.

    Attributes
    ----------
    sources : list of ImageList or Shards
        As they were read.
    printed : int
        Number of lines that `settle` has printed.
    """

    priority = chainer.training.PRIORITY_WRITER + 1  # before the evaluator

    def __init__(
        self,
        looks: Sequence[tuple[ImageList | Shards, Look]],
        root: str | Path,
        comm: chainermn.CommunicatorBase,
        skip: bool = False,
    ) -> None:
        self.sources = [source for source, _ in looks]
        self.root, self.comm = Path(root).resolve(), comm
        self.lists = [(s, look) for s, look in looks if isinstance(s, ImageList)]
        self.skip = skip
        self.printed = 0
        self.is_settled = False
        self._done = 0
        self._found: list[tuple[int, int, str]] = []  # list, image and what is wrong with it
        self._remedies: set[str] = set()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def trigger(self, trainer: chainer.training.Trainer) -> bool:
        """Tell whether to look at the result: after each iteration until it is there."""
        return not self.is_settled

    def settle(self, seconds: float | None = None) -> list[ImageList | Shards]:
        """Return the sources, without what is left out. Collective.

        Parameters
        ----------
        seconds : float, optional
            How long to wait. If this is not enough, the sources are returned as they are, and the
            work goes on; the trainer must be extended by this object.

        Raises
        ------
        OSError, RuntimeError
            On all ranks, if something is wrong with a file, unless such files are skipped.
        """
        self._wait(seconds)
        self.is_settled = all(self.comm.allgather_obj(not self._thread.is_alive()))
        if not self.is_settled:
            return list(self.sources)
        run_together(self.comm, "images", self._raise)
        parts = self.comm.allgather_obj(self._found)
        found = {(k, i): reason for part in parts for k, i, reason in part}
        if self.comm.rank == 0:
            for line in told([found[key] for key in sorted(found)]):
                print(f"skipped: {line}", flush=True)
                self.printed += 1
        lists = (
            listed.without({i for other, i in found if other == k})
            for k, (listed, _) in enumerate(self.lists)
        )
        return [next(lists) if isinstance(s, ImageList) else s for s in self.sources]

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """End the job if something is wrong with a file; before an evaluation, wait for that."""
        if trainer.updater.is_new_epoch:
            self._thread.join()
        if not self._thread.is_alive():
            try:
                self._raise()
            except OSError as error:
                exit_job(str(error))
            self.is_settled = True

    def _raise(self) -> None:
        if self._error:
            raise self._error
        if self._found and not self.skip:
            reasons = [reason for _, _, reason in self._found]
            remedies = [*sorted(self._remedies), "--skip-unreadable leaves such files out"]
            raise OSError("\n".join([*told(reasons), *remedies]))

    def _wait(self, seconds: float | None) -> None:
        self._thread.join(SECONDS if seconds is None else seconds)
        if seconds is None and self._thread.is_alive():
            total = sum(len(self._share(listed)) for listed, _ in self.lists)
            show = Progress(total, "looking at files") if self.comm.rank == 0 else None
            while self._thread.is_alive():
                self._thread.join(0.2)
                if show and self._done > show.done:
                    show.step(self._done - show.done)

    def _share(self, listed: ImageList) -> range:
        return range(self.comm.intra_rank, len(listed), self.comm.intra_size)

    def _work(self) -> None:
        try:
            for k, (listed, look) in enumerate(self.lists):
                index = read_index(listed)
                for i in self._unlike_before(listed, index):
                    stamp = None if index is None else index[i]
                    if reason := self._reason(listed, i, stamp, look):
                        self._found.append((k, i, reason))
                        if not self.skip and len(self._found) == NAMED:
                            return
        except Exception as error:
            self._error = error

    def _unlike_before(self, listed: ImageList, index: np.ndarray | None) -> Iterator[int]:
        """Yield the images of this rank's share whose files must be looked at more closely."""
        root, text, ends = os.fsencode(self.root) + b"/", memoryview(listed.text), listed.ends
        for i in self._share(listed):
            if index is None or not is_same(
                root, text[ends[i - 1] if i else 0 : ends[i]], index[i]
            ):
                yield i
            self._done += 1

    def _reason(
        self, listed: ImageList, i: int, stamp: np.ndarray | None, look: Look
    ) -> str | None:
        """Return what is wrong with a file."""
        path = os.path.join(self.root, listed[i][0])
        name = f"{shown(path)} ({listed.where(i)})" if listed.source else shown(path)
        host = socket.gethostname()
        changed = f"{name} has changed since prepare.py looked at it"
        try:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                status = os.stat(path)
                if listed.confined and images.leads_out(path, self.root):
                    reason = f"{listed[i][0]!a} leads out of {self.root}; {images.HINT}"
                    return f"{listed.where(i)}: {reason}"
        except OSError:
            self._remedies.add(EVERYWHERE)
            if stamp is None:
                return f"host {host} has no file {name}"
            self._remedies.add(AGAIN)
            return f"{changed}: host {host} has no such file"
        if stamp is not None:
            size, time = stamp.tolist()
            if status.st_size != size:
                self._remedies.add(AGAIN)
                return f"{changed}: {size} bytes then, {status.st_size} now, on {host}"
            if status.st_mtime_ns == time:
                return None
        try:
            look(path, self.root if listed.confined else None)
        except Exception as error:  # Pillow's decoders raise all kinds of exceptions
            return f"cannot read {name} on {host} ({type(error).__name__}: {error})"
        return None


def is_same(root: bytes, path: memoryview, stamp: np.ndarray) -> bool:
    """Tell whether a file that is not a link has the size and time that prepare.py saw."""
    try:
        return stamp_of(os.lstat(root + path)) == tuple(stamp.tolist())
    except OSError:
        return False


def told(reasons: Sequence[str], most: int = NAMED) -> list[str]:
    """Return the first reasons, and how many more there are."""
    n = len(reasons) - most
    return [*reasons[:most], f"... and {n} more"] if n > 0 else list(reasons)
