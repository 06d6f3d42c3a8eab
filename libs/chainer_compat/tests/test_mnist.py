"""MNIST is downloaded from mirrors, checked, and cached where Chainer looks for it.

No test uses the internet: the mirrors are servers that the tests start.
"""

import contextlib
import functools
import gzip
import hashlib
import queue
import socket
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import URLError

import chainer
import numpy as np
import pytest
from chainer.dataset import cached_download, download, get_dataset_root, set_dataset_root
from chainer.datasets import get_mnist

from chainer_compat.repairs import mnist

NAMES = [
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
]
# Chainer caches a file under the MD5 of its URL.
CACHED = {
    name: hashlib.md5((mnist.HOST + name).encode(), usedforsecurity=False).hexdigest()
    for name in NAMES
}
PIXELS = np.random.RandomState(0).randint(0, 256, (5, 784)).astype(np.uint8)
LABELS = np.array([3, 1, 4, 1, 5], np.uint8)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Write a small MNIST, three training and two test examples, that passes for the real one.

    The folder has a space in its name, as users' folders may.
    """
    folder = tmp_path / "the files"
    folder.mkdir()
    for part, chosen in (("train", slice(3)), ("t10k", slice(3, 5))):
        x, y = PIXELS[chosen], LABELS[chosen]
        images = b"\0\0\x08\x03" + np.array([len(x), 28, 28], ">i4").tobytes() + x.tobytes()
        labels = b"\0\0\x08\x01" + np.array([len(y)], ">i4").tobytes() + y.tobytes()
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    for name in NAMES:
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        monkeypatch.setitem(mnist.SHA256, name, digest)
    return folder


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """Give Chainer an empty cache, no mirrors, no proxy, and a repair that has said nothing."""
    before = get_dataset_root()
    set_dataset_root(str(tmp_path / "root"))
    monkeypatch.setattr(mnist, "MIRRORS", ())
    monkeypatch.delenv("CHAINER_COMPAT_MNIST", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "cached_download", download.cached_download.__wrapped__)
    mnist.fetch_from_mirrors(download)
    yield tmp_path / "root"
    set_dataset_root(before)


class Server(ThreadingHTTPServer):
    """A server for a folder that puts the requested paths into a queue."""

    def __init__(self, folder, answer=None):
        self.asked = asked = queue.Queue()

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self):
                asked.put(self.path)
                super().do_GET() if answer is None else answer(self)

            def log_message(self, *_):
                pass

        handler = lambda *arguments: Handler(*arguments, directory=folder)  # noqa: E731
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"

    def requests(self):
        return [self.asked.get_nowait() for _ in range(self.asked.qsize())]


@pytest.fixture
def serve(files):
    """Start servers that send the files, or that answer by calling a function."""
    servers = []

    def start(answer=None):
        servers.append(Server(files, answer))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def refusing():
    """Return a URL that refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/"


def assert_is_ours(data):
    train, test = data
    x, y = chainer.dataset.concat_examples([*train, *test])
    np.testing.assert_array_equal(np.rint(x * 255).astype(np.uint8), PIXELS)
    assert y.tolist() == LABELS.tolist()


def cache_of(root):
    """Return the contents of Chainer's download cache by file name, without its locks."""
    folder = root / "_dl_cache"
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.endswith("_lock")}


def test_the_table_has_the_files_that_chainer_asks_for(files, monkeypatch):
    asked = []

    def record(url):
        asked.append(url)
        return str(files / url.rpartition("/")[2])

    monkeypatch.setattr(download, "cached_download", record)
    get_mnist()
    assert asked == [mnist.HOST + name for name in mnist.SHA256]


def test_the_files_of_a_mirror_are_cached_where_chainer_looks(
    serve, files, root, monkeypatch, capfd
):
    mirror, unused = serve(), serve()
    monkeypatch.setattr(mnist, "MIRRORS", (mirror.url, unused.url))
    assert_is_ours(get_mnist())
    assert mirror.requests() == [f"/{name}" for name in NAMES]
    assert unused.requests() == []
    assert capfd.readouterr() == ("", f"Downloading MNIST from {mirror.url}...\n")
    assert cache_of(root) == {CACHED[name]: (files / name).read_bytes() for name in NAMES}
    assert {path.name for path in root.glob("pfnet/chainer/mnist/*")} == {"train.npz", "test.npz"}


@pytest.mark.parametrize("lost", ["", "pfnet/chainer/mnist/*.npz", "_dl_cache/*"])
def test_a_filled_cache_is_used_silently(lost, files, root, monkeypatch, capfd):
    monkeypatch.setenv("CHAINER_COMPAT_MNIST", str(files))
    get_mnist()
    monkeypatch.setenv("CHAINER_COMPAT_MNIST", str(root / "absent"))
    capfd.readouterr()
    for path in root.glob(lost) if lost else ():
        path.unlink()
    assert_is_ours(get_mnist())
    assert capfd.readouterr() == ("", "")


def not_found(handler):
    handler.send_error(404)


def garbage(handler):
    """Answer as a captive portal does."""
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"<html>Please log in</html>")


def cut_off(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"\x1f\x8b")


def hang_up(handler):
    handler.close_connection = True


@pytest.mark.parametrize("answer", [not_found, garbage, cut_off, hang_up, None])
def test_the_next_mirror_is_asked(answer, serve, refusing, files, root, monkeypatch, capfd):
    first = refusing if answer is None else serve(answer).url
    second = serve()
    monkeypatch.setattr(mnist, "MIRRORS", (first, second.url))
    assert_is_ours(get_mnist())
    assert second.requests() == [f"/{name}" for name in NAMES]
    assert cache_of(root) == {CACHED[name]: (files / name).read_bytes() for name in NAMES}
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"Downloading MNIST from {url}..." for url in (first, second.url)]


def test_a_file_with_another_digest_is_refused(files, root, monkeypatch):
    expected = mnist.SHA256[NAMES[1]]
    (files / NAMES[1]).write_bytes(gzip.compress(b"another"))
    got = hashlib.sha256((files / NAMES[1]).read_bytes()).hexdigest()
    monkeypatch.setattr(mnist, "MIRRORS", (f"{files.as_uri()}/",))
    with pytest.raises(OSError) as caught:
        get_mnist()
    assert f"{files.as_uri()}/{NAMES[1]}: " in str(caught.value)
    assert expected in str(caught.value)
    assert got in str(caught.value)
    assert cache_of(root).keys() == {CACHED[NAMES[0]]}
    assert list(root.rglob("*.npz")) == []


def test_no_more_is_read_than_the_largest_file_has(files, monkeypatch):
    monkeypatch.setattr(mnist, "MIRRORS", (f"{files.as_uri()}/",))
    monkeypatch.setattr(mnist, "LARGEST", 9)
    with pytest.raises(OSError, match="got 10 bytes with"):
        get_mnist()


def test_a_disk_that_fills_up_leaves_no_part_of_a_file_in_the_cache(files, root, python):
    code = f"""
import resource
from chainer.dataset import cached_download
from chainer_compat.repairs import mnist

name = {NAMES[0]!r}
mnist.SHA256[name] = {mnist.SHA256[NAMES[0]]!r}
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
try:
    cached_download(mnist.HOST + name)
finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
"""
    environment = {"CHAINER_DATASET_ROOT": str(root), "CHAINER_COMPAT_MNIST": str(files)}
    errors = python(code, "-B", fails=True, **environment)
    assert errors.splitlines()[-1] == "OSError: [Errno 27] File too large"
    assert CACHED[NAMES[0]] not in cache_of(root)


def test_without_a_network_the_error_names_three_ways(refusing, root, monkeypatch):
    monkeypatch.setattr(mnist, "MIRRORS", (refusing, f"{refusing}again/"))
    with pytest.raises(OSError) as caught:
        get_mnist()
    first, one, other, _, *ways = str(caught.value).splitlines()
    assert first == "MNIST could not be downloaded:"
    assert one.startswith(f"  {refusing}{NAMES[0]}: ")
    assert other.startswith(f"  {refusing}again/{NAMES[0]}: ")
    assert "Connection refused" in other
    assert len(ways) == 3
    assert "train.npz and test.npz" in ways[0]
    assert str(root / "pfnet/chainer/mnist") in ways[0]
    assert "CHAINER_DATASET_ROOT" in ways[1]
    assert "CHAINER_COMPAT_MNIST" in ways[2]
    assert ", ".join(NAMES) in ways[2]


def test_the_first_two_ways_work(files, root, tmp_path, monkeypatch, python):
    monkeypatch.setenv("CHAINER_COMPAT_MNIST", str(files))
    get_mnist()
    for name in ("train.npz", "test.npz"):
        path = tmp_path / "other/pfnet/chainer/mnist" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((root / "pfnet/chainer/mnist" / name).read_bytes())
    code = "from chainer.datasets import get_mnist; print(*map(len, get_mnist()))"
    assert python(code, CHAINER_DATASET_ROOT=str(tmp_path / "other")) == "3 2"


@pytest.mark.parametrize("form", ["path", "relative", "home", "file", "http", "no slash"])
def test_files_of_ones_own(form, serve, files, monkeypatch, capfd):
    server = serve()
    monkeypatch.chdir(files.parent)
    monkeypatch.setenv("HOME", str(files.parent))
    value, expected = {
        "path": (str(files), files.as_uri()),
        "relative": (files.name, files.as_uri()),
        "home": (f"~/{files.name}", files.as_uri()),
        "file": (files.as_uri(), files.as_uri()),
        "http": (server.url, server.url),
        "no slash": (server.url.rstrip("/"), server.url),
    }[form]
    monkeypatch.setenv("CHAINER_COMPAT_MNIST", value)
    assert_is_ours(get_mnist())
    assert capfd.readouterr().err == f"Downloading MNIST from {expected.rstrip('/')}/...\n"


@pytest.mark.parametrize("value", ["absent", "http:", "http://a host/", "http://[", "nothing://x"])
def test_what_is_named_is_asked_and_no_other(value, serve, root, monkeypatch):
    mirror = serve()
    monkeypatch.setattr(mnist, "MIRRORS", (mirror.url,))
    monkeypatch.setenv("CHAINER_COMPAT_MNIST", value)
    with pytest.raises(OSError, match="MNIST could not be downloaded"):
        get_mnist()
    assert mirror.requests() == []
    assert cache_of(root) == {}


def test_it_can_be_switched_off(python, tmp_path, files):
    code = (
        "import urllib.request\n"
        "def urlretrieve(url, path):\n"
        "    raise OSError(url)\n"
        "urllib.request.urlretrieve = urlretrieve\n"
        "import chainer; chainer.datasets.get_mnist()"
    )
    environment = {"CHAINER_DATASET_ROOT": str(tmp_path), "CHAINER_COMPAT_MNIST": str(files)}
    errors = python(code, fails=True, CHAINER_COMPAT_SKIP="mnist-mirrors", **environment)
    assert errors.splitlines()[0] == f"Downloading from {mnist.HOST}{NAMES[0]}..."
    assert errors.splitlines()[-1] == f"OSError: {mnist.HOST}{NAMES[0]}"


ONE_OF_TWO = f"""
import sys
from chainer.dataset import cached_download, download

class FileLock(download.filelock.FileLock):
    def _acquire(self):
        super()._acquire()
        if not self.is_locked:
            print("has to wait", flush=True)

download.filelock.FileLock = FileLock
from chainer_compat.repairs import mnist
mnist.SHA256[{NAMES[3]!r}] = sys.argv[1]
print(cached_download({mnist.HOST + NAMES[3]!r}))
"""


def test_of_two_processes_one_downloads_and_the_other_waits(serve, files, root, monkeypatch):
    released = threading.Event()

    def answer(handler):
        released.wait()
        SimpleHTTPRequestHandler.do_GET(handler)

    server = serve(answer)
    monkeypatch.setenv("CHAINER_DATASET_ROOT", str(root))
    monkeypatch.setenv("CHAINER_COMPAT_MNIST", server.url)
    command = [sys.executable, "-c", ONE_OF_TWO, mnist.SHA256[NAMES[3]]]
    start = functools.partial(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)
    with contextlib.ExitStack() as processes:
        first = processes.enter_context(start())
        happened = [server.asked.get(timeout=100)]
        second = processes.enter_context(start())
        processes.callback(released.set)  # before they are waited for, even if a line fails
        # The second process either says that it has to wait or, wrongly, asks the server.
        said = threading.Thread(target=lambda: server.asked.put(second.stdout.readline()))
        said.start()
        happened.append(server.asked.get(timeout=100))
        released.set()
        said.join()
        paths = {process.stdout.read().split()[-1] for process in (first, second)}
    cached = root / "_dl_cache" / CACHED[NAMES[3]]
    assert happened == [f"/{NAMES[3]}", "has to wait\n"]
    assert paths == {str(cached)}
    assert cached.read_bytes() == (files / NAMES[3]).read_bytes()
    assert server.requests() == []


def test_other_downloads_are_chainers_and_say_what_to_do_when_they_fail(
    serve, files, refusing, root, capfd
):
    server = serve()
    path = cached_download(server.url + NAMES[0])
    assert cache_of(root) == {path.rpartition("/")[2]: (files / NAMES[0]).read_bytes()}
    assert capfd.readouterr().err == f"Downloading from {server.url}{NAMES[0]}...\n"

    url = f"{refusing}cifar-10.tar.gz"
    with pytest.raises(URLError, match="Connection refused") as caught:
        cached_download(url)
    (note,) = caught.value.__notes__
    first, named, rest = note.splitlines()
    assert first.startswith(f"{url} could not be downloaded.")
    assert "CHAINER_DATASET_ROOT" in rest
    place = named.removesuffix(",")
    with open(place, "w") as file:
        file.write("saved by hand")
    assert cached_download(url) == place


def test_a_folder_that_cannot_be_made_is_no_matter_of_the_network(tmp_path, serve):
    (tmp_path / "file").touch()
    set_dataset_root(str(tmp_path / "file"))
    with pytest.raises(OSError) as caught:
        cached_download(serve().url)
    assert not hasattr(caught.value, "__notes__")
