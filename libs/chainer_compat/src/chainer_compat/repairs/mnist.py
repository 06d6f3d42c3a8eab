"""Download MNIST from mirrors, because its original host no longer serves it."""

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from types import ModuleType
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from chainer_compat import settings, surgery

HOST = "http://yann.lecun.com/exdb/mnist/"
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
SHA256 = {
    "train-images-idx3-ubyte.gz": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
    ),
    "train-labels-idx1-ubyte.gz": (
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
    ),
    "t10k-images-idx3-ubyte.gz": (
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
    ),
}
LARGEST = 9_912_422  # bytes of the largest of them
SECONDS_WITHOUT_AN_ANSWER = 30


def fetch_from_mirrors(module: ModuleType) -> None:
    """Fetch MNIST's files from mirrors, and say what else to do if a download fails.

    Files go where Chainer would cache them. If several processes ask at the same time, the first
    one downloads and the others wait for it; Chainer would let all of them download.
    """
    own = module.cached_download
    # Once per process rather than once per file.
    announce = functools.cache(
        lambda source: print(f"Downloading MNIST from {source}...", file=sys.stderr, flush=True)
    )

    @surgery.replaces(module, "cached_download")
    def cached_download(url: str) -> str:
        root = Path(module.get_dataset_root()).absolute()
        name_there = hashlib.md5(url.encode(), usedforsecurity=False).hexdigest()
        cached = root / "_dl_cache" / name_there
        name = url.removeprefix(HOST)
        if url == HOST + name and name in SHA256:
            cached.parent.mkdir(parents=True, exist_ok=True)
            with module.filelock.FileLock(cached.parent / "_mnist_lock"):
                if not cached.exists():
                    partial = cached.with_suffix(".part")
                    partial.write_bytes(_fetch(name, root, announce))
                    os.replace(partial, cached)
        try:
            return str(own(url))
        except (URLError, ConnectionError, TimeoutError) as error:
            error.add_note(
                f"{url} could not be downloaded. Either download it where you can and save it as\n"
                f"{cached},\nor set CHAINER_DATASET_ROOT to a copy of the folder "
                "~/.chainer/dataset of a machine that has the data."
            )
            raise


def _fetch(name: str, root: Path, announce: Callable[[str], None]) -> bytes:
    """Return the content of a file of MNIST from the first source with the right content."""
    failures = []
    for source in _sources():
        announce(source)
        try:
            # Users may also name file: URLs.
            with urlopen(source + name, timeout=SECONDS_WITHOUT_AN_ANSWER) as response:  # noqa: S310
                content: bytes = response.read(LARGEST + 1)
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, HTTPError):
                error.close()  # it holds the connection
            failures.append(f"{source}{name}: {error}")
            continue
        digest = hashlib.sha256(content).hexdigest()
        if digest == SHA256[name]:
            return content
        failures.append(
            f"{source}{name}: expected a file with SHA-256 {SHA256[name]}, "
            f"got {len(content)} bytes with {digest}"
        )
    folder = root / "pfnet/chainer/mnist"
    raise OSError(
        "MNIST could not be downloaded:\n  " + "\n  ".join(failures) + "\n"
        "There are three ways without a download:\n"
        f"  1. Copy train.npz and test.npz of Chainer's cache from another machine to {folder}.\n"
        "  2. Set CHAINER_DATASET_ROOT to a folder that has them in pfnet/chainer/mnist, such as "
        "one that all hosts share.\n"
        f"  3. Set {settings.MNIST} to a folder, or to a URL on a server of your own, that has "
        f"the files {', '.join(SHA256)}."
    )


def _sources() -> Sequence[str]:
    """Return the URLs, with a slash at the end, of the folders that may have the files."""
    own = settings.mnist()
    if not own:
        return MIRRORS
    url = own if "://" in own else Path(own).expanduser().absolute().as_uri()
    return (url.rstrip("/") + "/",)
