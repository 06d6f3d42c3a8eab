"""Every check of the doctor when something is wrong: what it says, and its remedy."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import textwrap
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chainermn.doctor import host_facts
from chainermn.doctor.checks import CHECKS
from chainermn.doctor.probe import Outcome
from chainermn.doctor.registry import Status, good, not_tried
from chainermn.doctor.setup import Answer, Setup
from chainermn.process import THREAD_VARIABLES

BY_NAME = {check.name: check for check in CHECKS}

Spoil = Callable[["Bench"], Setup]
#: (name of a check, what it finds, its remedy, function that causes it)
CASES: list[Any] = []


def wrong(name: str, found: str, remedy: str) -> Callable[[Spoil], Spoil]:
    """Add a case: once the function breaks something, the check finds it and offers a remedy."""

    def add(spoil: Spoil) -> Spoil:
        marks = [pytest.mark.each_mpi] if BY_NAME[name].subject in ("MPI", "GPU") else []
        case = f"{name}: {spoil.__name__}"
        CASES.append(pytest.param(name, found, remedy, spoil, id=case, marks=marks))
        return spoil

    return add


class Bench:
    """Everything that a case can break."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flavor: str) -> None:
        self.path = tmp_path
        self.patch = monkeypatch
        self.flavor = flavor

    def module(self, name: str, text: str) -> None:
        """Put a module ahead of all others for the processes that the doctor starts."""
        folder = self.path / "modules"
        path = folder / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        self.patch.setenv("PYTHONPATH", str(folder))

    def command(self, name: str, script: str) -> Path:
        """Put a shell script first on PATH."""
        path = self.path / "commands" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{textwrap.dedent(script)}\n")
        path.chmod(0o755)
        self.patch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
        return path

    def cores(self, number: int) -> None:
        self.patch.setattr(host_facts, "cores", lambda: number)

    def no_mpiexec_beside_python(self) -> None:
        self.patch.setattr("chainermn.launch.mpiexec.sysconfig.get_path", lambda name: "/nowhere")


@pytest.fixture
def bench(
    flavor: str, forgets_mpiexec: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    for name in (*THREAD_VARIABLES, "CUDA_VISIBLE_DEVICES", "CHAINERMN_CUDA_AWARE"):
        monkeypatch.delenv(name, raising=False)
    return Bench(tmp_path, monkeypatch, flavor)


def after(**outcomes: Outcome) -> Setup:
    """Return a setup in which some probes have run."""
    return Setup(limit=60, outcomes=dict(outcomes))


# ---- Python ----


@wrong("chainer-compat", "No module named 'nothing'", "pip install --force-reinstall")
def does_not_import(bench: Bench) -> Setup:
    bench.module("chainer_compat.report", "import nothing")
    bench.module("chainer_compat.__init__", "")
    return Setup()


@wrong("chainer-compat", "switched off", "unset CHAINER_COMPAT_DISABLE")
def switched_off(bench: Bench) -> Setup:
    bench.patch.setenv("CHAINER_COMPAT_DISABLE", "1")
    return Setup()


@wrong("chainer-compat", "not in place: no .pth file", "pip install --force-reinstall")
def without_hook(bench: Bench) -> Setup:
    return after(compat=Outcome({"hook": "not in place: no .pth file was processed"}))


@wrong("oneDNN", "without libgomp.so.1", "pip uninstall onednn-cpu-gomp")
def onednn_lacks_a_library(bench: Bench) -> Setup:
    report = {"hook": "in place", "repairs": []}
    reason = "oneDNN is installed, but without libgomp.so.1"
    return after(compat=Outcome({**report, "onednn": f"not used: {reason}"}))


@wrong("Chainer computes", "modules/chainer.py:1", "its package, for example Chainer: echo")
def chainer_does_not_import(bench: Bench) -> Setup:
    bench.module("chainer", "raise ImportError('spoilt')")
    return Setup()


@wrong("Chainer computes", "np.sctypes", "unset CHAINER_COMPAT_SKIP")
def repair_left_out(bench: Bench) -> Setup:
    bench.patch.setenv("CHAINER_COMPAT_SKIP", "as-strided-sctypes")
    return Setup()


@wrong("chainermn is this one", "instead of", "unset CHAINER_COMPAT_BUNDLED_CHAINERMN")
def copy_of_chainer(bench: Bench) -> Setup:
    bench.patch.setenv("CHAINER_COMPAT_BUNDLED_CHAINERMN", "1")
    return Setup()


@wrong("chainermn is this one", "/chainermn/__init__.py instead of", "rename that folder: mv ")
def folder_beside_the_script(bench: Bench) -> Setup:
    (bench.path / "chainermn").mkdir()
    (bench.path / "chainermn" / "__init__.py").touch()
    (bench.path / "typing.py").touch()  # which must not matter
    (bench.path / "train.py").touch()
    return Setup(script=bench.path / "train.py")


@wrong("chainermn imports", "modules/threadpoolctl.py:1", "move it away")
def dependency_is_broken(bench: Bench) -> Setup:
    bench.module("threadpoolctl", "raise ImportError('spoilt')")
    return Setup()


@wrong("cores and GPUs", "a: ranks: 2, cores: 1, GPUs: 0", "at most one rank per core")
def too_few_cores(bench: Bench) -> Setup:
    setup = Setup(ranks=2)
    bench.patch.setattr(socket, "gethostname", lambda: "a")
    setup.__dict__["facts"] = {"a": Answer({"cores": 1, "gpus": 0})}
    return setup


@wrong("cores and GPUs", "b: ranks: 2, cores: 1, GPUs: 0", "at most one rank per core")
def too_few_cores_there(bench: Bench) -> Setup:
    return two_hosts(cores=1)


@wrong("cores and GPUs", "b: ranks: 2, cores: 2, GPUs: 1", "on GPUs, one rank per GPU")
def too_few_gpus(bench: Bench) -> Setup:
    return two_hosts(gpus=1)


@wrong("cores and GPUs", "GPUs: not known, as nvidia-smi does not answer", "one rank per core")
def gpus_that_do_not_answer(bench: Bench) -> Setup:
    return two_hosts(cores=1, gpus=None)


@wrong("threads", "OMP_NUM_THREADS=4: 8 threads in total on 4 cores", ": unset OMP_NUM_THREADS")
def too_many_threads(bench: Bench) -> Setup:
    bench.cores(4)
    bench.patch.setenv("OMP_NUM_THREADS", "4")
    return Setup(ranks=2)


@wrong("threads", "MKL_NUM_THREADS='abc': expected a number", ": unset MKL_NUM_THREADS")
def no_number_of_threads(bench: Bench) -> Setup:
    bench.patch.setenv("OMP_NUM_THREADS", "1")
    bench.patch.setenv("MKL_NUM_THREADS", "abc")
    return Setup()


@wrong("files", "/train.py: missing", "copy it to every host")
def script_is_not_here(bench: Bench) -> Setup:
    return Setup(script=bench.path / "train.py")


@wrong("files", "a: train.py: 0123; b: train.py: missing", "copy it to every host")
def script_is_missing(bench: Bench) -> Setup:
    return two_hosts(files={"train.py": "missing", "images": "3 entries"})


@wrong("files", "a: images: 3 entries; b: images: 2 entries", "or share its folder")
def data_differ(bench: Bench) -> Setup:
    return two_hosts(files={"train.py": "0123", "images": "2 entries"})


# ---- MPI ----


def version_line(flavor: str) -> str:
    return {"mpich": "HYDRA build details:", "openmpi": "mpiexec (Open MPI) 5.0"}[flavor]


OTHER = {"mpich": "openmpi", "openmpi": "mpich"}


@wrong("mpiexec", "none beside this Python or on PATH", " install --force-reinstall")
def not_there(bench: Bench) -> Setup:
    bench.no_mpiexec_beside_python()
    bench.patch.setenv("PATH", str(bench.path))
    return Setup()


@wrong("mpiexec", "(neither MPICH nor Open MPI): of somebody", " install --force-reinstall")
def of_no_mpi_we_know(bench: Bench) -> Setup:
    bench.no_mpiexec_beside_python()
    bench.patch.setenv("PATH", str(bench.command("mpiexec", "echo of somebody").parent))
    return Setup()


@wrong("mpi4py", "ModuleNotFoundError: No module named 'nothing'", "'mpi4py>=4.1'")
def mpi4py_does_not_import(bench: Bench) -> Setup:
    bench.module("mpi4py", "import nothing")
    return Setup()


@wrong("mpi4py", "mpi4py cannot load an MPI library", ": unset MPI4PY_LIBMPI")
def library_is_missing(bench: Bench) -> Setup:
    bench.patch.setenv("MPI4PY_LIBMPI", str(bench.path / "libmpi.so"))
    return Setup()


@wrong("mpiexec of that MPI", "but every mpiexec found belongs to another", "put the mpiexec")
def only_that_of_another(bench: Bench) -> Setup:
    bench.no_mpiexec_beside_python()
    path = bench.command("mpiexec", f"echo '{version_line(OTHER[bench.flavor])}'")
    bench.patch.setenv("PATH", str(path.parent))
    return Setup()


@wrong("mpiexec of that MPI", "the mpiexec on PATH is", "start jobs with chainermn launch")
def that_of_another_comes_first(bench: Bench) -> Setup:
    bench.command("mpiexec", f"echo '{version_line(OTHER[bench.flavor])}'")
    return Setup()


def replace_mpiexec(bench: Bench, script: str) -> None:
    """Replace the mpiexec of the MPI in use with a script."""
    script = f"[ $1 = --version ] && echo '{version_line(bench.flavor)}' && exit\n{script}"
    bench.no_mpiexec_beside_python()
    path = bench.command("mpiexec", script)
    bench.patch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")


@wrong("two ranks", "two processes started, but each one is alone", "take both from the same")
def twice_one_rank(bench: Bench) -> Setup:
    replace_mpiexec(
        bench, 'while [ "$1" != -n ]; do shift; done; shift 2\n"$@" || exit; exec "$@"'
    )
    return Setup()


@wrong(
    "two ranks", "ended with exit code 3 and no answer: no such fabric", "see the whole output: "
)
def job_fails(bench: Bench) -> Setup:
    replace_mpiexec(bench, "echo no such fabric >&2; exit 3")
    return Setup()


@wrong("two ranks", "no answer within 0.1 s", "see the whole output: ")
def job_hangs(bench: Bench) -> Setup:
    replace_mpiexec(bench, "exec sleep 600")
    return Setup(limit=0.1)


@wrong("thread level", "MPI_THREAD_SINGLE: double_buffering", ": unset MPI4PY_RC_THREAD_LEVEL")
def no_threads(bench: Bench) -> Setup:
    bench.patch.setenv("MPI4PY_RC_THREAD_LEVEL", "single")
    return Setup()


@wrong("/dev/shm", "64 MiB free, less than 128 MiB", "docker run --shm-size=1g")
def as_docker_gives_it(bench: Bench) -> Setup:
    bench.patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**26))
    return Setup()


@wrong("shared memory", "4 ranks cannot share memory: crashed with SIGBUS", "--shm-size=1g")
def crashes_in_shared_memory(bench: Bench) -> Setup:
    setup = after(shared_memory=Outcome(failure="crashed with SIGBUS"))
    setup.ranks = 4
    return setup


@wrong("shared memory", "2 ranks cannot share memory: [Errno 111] Conn", "--network=host")
def containers_have_networks_of_their_own(bench: Bench) -> Setup:
    return after(shared_memory=Outcome("[Errno 111] Connection refused"))


@wrong("all-reduce", "flat: wrong means of float64", "a communicator that is exact (naive)")
def one_is_wrong(bench: Bench) -> Setup:
    return after(communicators=Outcome({"naive": "", "flat": "wrong means of float64"}))


@wrong("all-reduce", "ImportError: spoilt", "please report this")
def job_fails_at_import(bench: Bench) -> Setup:
    bench.module("chainer", "raise ImportError('spoilt')")
    return Setup()


# ---- GPUs ----

DRIVER = {"cuda": "13.0", "error": "", "gpus": ["H200"], "capabilities": [90]}
WITH_A_V100 = {"gpus": ["H200", "V100"], "capabilities": [90, 70]}


def driver(**changes: Any) -> Outcome:
    return Outcome({**DRIVER, **changes})


@wrong("GPUs", "cuInit fails with error 803", "restart the machine")
def driver_does_not_start(bench: Bench) -> Setup:
    return after(cuda=driver(error="cuInit fails with error 803", gpus=[]))


@wrong("GPUs", "crashed with SIGSEGV", "run nvidia-smi")
def driver_crashes(bench: Bench) -> Setup:
    return after(cuda=Outcome(failure="crashed with SIGSEGV"))


@wrong("GPUs", "none, CUDA_VISIBLE_DEVICES=''", "unset CUDA_VISIBLE_DEVICES")
def none_visible(bench: Bench) -> Setup:
    bench.patch.setenv("CUDA_VISIBLE_DEVICES", "")
    return after(cuda=driver(gpus=[]))


@wrong("GPUs", "supports CUDA up to 11.8", "update the driver: CuPy 14 needs CUDA 12")
def driver_is_old(bench: Bench) -> Setup:
    return after(cuda=driver(cuda="11.8"))


@wrong("CuPy", "not installed", "install it: ")
def cupy_not_installed(bench: Bench) -> Setup:
    install_cupy(bench)
    return after(cuda=driver())


@wrong("CuPy", "not installed", " install 'cupy-cuda12x[ctk]>=14'")
def cupy_for_a_v100(bench: Bench) -> Setup:
    install_cupy(bench)
    return after(cuda=driver(**WITH_A_V100))


@wrong(
    "CuPy", "does not support the V100 (compute capability 7.0)", "uninstall -y cupy-cuda13x && "
)
def cupy_without_code_for_a_v100(bench: Bench) -> Setup:
    fake_cupy(bench)
    return after(cuda=driver(**WITH_A_V100))


def install_cupy(bench: Bench, *distributions: str) -> None:
    bench.patch.setattr(
        "chainermn.doctor.checks.gpu.metadata.packages_distributions",
        lambda: {"cupy": list(distributions)} if distributions else {},
    )


@wrong("CuPy", "ImportError: libnvrtc.so.13", " install 'cupy-cuda13x[ctk]>=14'")
def cupy_does_not_import(bench: Bench) -> Setup:
    install_cupy(bench, "cupy-cuda13x")
    bench.module("cupy", "raise ImportError('libnvrtc.so.13: cannot open shared object file')")
    return after(cuda=driver())


# NumPy in place of the GPU.
FAKE_CUPY = """
from types import SimpleNamespace
import numpy
from numpy import dtype, zeros_like

__version__ = "14.2.0"

class ndarray(numpy.ndarray):
    def get(self): return numpy.asarray(self)

def arange(n, dtype=None):
    return numpy.arange(n, dtype=dtype).view(ndarray)

class Device:
    def __init__(self, number): pass
    def use(self): {use}

class Event:
    def __init__(self, **settings): pass
    def record(self): pass
    def synchronize(self): pass

runtime = SimpleNamespace(
    runtimeGetVersion=lambda: 13000, getDeviceCount=lambda: 1, CUDARuntimeError=RuntimeError
)
cuda = SimpleNamespace(runtime=runtime, Device=Device, Event=Event, {nccl})
"""


def fake_cupy(bench: Bench, *, use: str = "pass", nccl: str = "") -> None:
    install_cupy(bench, "cupy-cuda13x")
    bench.module("cupy", FAKE_CUPY.format(use=use, nccl=nccl))


@wrong("NCCL", "Error: ", " install 'nvidia-nccl-cu13>=2.27'")
def no_nccl(bench: Bench) -> Setup:
    fake_cupy(bench)
    return after(cuda=driver())


@wrong("CUDA-aware MPI", "=1 is set, but MPI cannot take", "run: unset CHAINERMN_CUDA_AWARE")
def crashes(bench: Bench) -> Setup:
    fake_cupy(bench, use="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    bench.patch.setenv("CHAINERMN_CUDA_AWARE", "1")
    return after(cuda=driver())


@wrong("CUDA-aware MPI", "and got wrong numbers", "run: unset CHAINERMN_CUDA_AWARE")
def moves_nonsense(bench: Bench) -> Setup:
    bench.patch.setenv("CHAINERMN_CUDA_AWARE", "1")
    return after(cuda=driver(), device_memory=Outcome(False))


# ---- hosts ----

SOFTWARE = {"Python": "3.12.1", "mpiexec": "5.0.2", "chainer": "7.8.1", "numpy": "2.4.6"}
FACTS = {
    "software": SOFTWARE,
    "files": {"train.py": "0123", "images": "3 entries"},
    "gpus": 0,
    "cores": 2,
}


def two_hosts(job: Sequence[dict[str, Any]] = (), **there: Any) -> Setup:
    """Return a setup with two hosts that differ in some facts, and with what their ranks see."""
    setup = Setup(hosts=[("a", 2), ("b", 2)], script=Path("train.py"), data=Path("images"))
    setup.__dict__["facts"] = {
        "a": Answer({**FACTS, "host": "a"}),
        "b": Answer({**FACTS, "host": "b", **there}),
    }
    setup.outcomes["ranks", "hosts"] = Outcome(list(job) or [rank_on(host) for host in "aabb"])
    return setup


def failing(setup: Setup, probe: str, failure: str) -> Setup:
    """Let a probe over the hosts fail."""
    setup.outcomes[probe, "hosts"] = Outcome(failure=failure)
    return setup


def rank_on(host: str, **environment: str) -> dict[str, Any]:
    return {"host": host, "environment": {**os.environ, **environment}}


@wrong("ssh without a password", "elsewhere: root@elsewhere: Permission denied", "ssh-copy-id")
def password_wanted(bench: Bench) -> Setup:
    bench.command("ssh", "echo 'root@elsewhere: Permission denied (publickey).' >&2; exit 255")
    return Setup(hosts=[("elsewhere", 1)])


@wrong("ssh without a password", "No route to host", "check that elsewhere is the right name")
def host_is_down(bench: Bench) -> Setup:
    bench.command("ssh", "echo 'ssh: connect to host elsewhere: No route to host' >&2; exit 255")
    return Setup(hosts=[("elsewhere", 1)])


@wrong("ssh without a password", "there is no ssh on this host", "install an ssh client")
def no_ssh(bench: Bench) -> Setup:
    bench.patch.setenv("PATH", str(bench.path))
    return Setup(hosts=[("elsewhere", 1)])


# Runs the given command on this host, as sshd would on the other one.
SSH = 'for last; do :; done; {before}; exec sh -c "{prefix} $last"'


@wrong("same software", "elsewhere: ", "install the same environment at the same path")
def no_python_there(bench: Bench) -> Setup:
    bench.command("ssh", SSH.format(before="cd /", prefix="/nowhere"))
    return Setup(hosts=[("elsewhere", 1)])


@wrong("a job over the hosts", "a and b call themselves a", "hostnamectl set-hostname")
def same_name(bench: Bench) -> Setup:
    return two_hosts(host="a")


@wrong("a job over the hosts", "localhost and 127.0.0.1 call", "name it once, as in --host loc")
def one_host_of_two_names(bench: Bench) -> Setup:
    return Setup(hosts=[("localhost", 2), ("127.0.0.1", 3)])


@wrong("a job over the hosts", "no answer within", "use --network to tell Open MPI which")
def job_over_hosts_hangs(bench: Bench) -> Setup:
    return failing(two_hosts(), "ranks", "no answer within 60 s")


@wrong("a job over the hosts", "b: unable to get host", "names and addresses of all hosts")
def names_are_not_known_there(bench: Bench) -> Setup:
    return failing(two_hosts(), "ranks", "b: unable to get host address for a")


@wrong("a job over the hosts", "b: unable to change wdir to /x", "every host has at the same path")
def folder_is_not_there(bench: Bench) -> Setup:
    return failing(two_hosts(), "ranks", "b: unable to change wdir to /x")


@wrong(
    "a job over the hosts",
    "ranks run elsewhere than expected: rank 2 on a, expected b",
    "unset variables that change",
)
def all_on_the_first(bench: Bench) -> Setup:
    return two_hosts([rank_on("a")] * 4)


@wrong("environment", "NCCL_DEBUG is not the same on b", "chainermn launch --forward NCCL_DEBUG")
def not_forwarded(bench: Bench) -> Setup:
    bench.patch.setenv("NCCL_DEBUG", "INFO")
    return two_hosts([rank_on("a"), rank_on("b", NCCL_DEBUG="")])


@wrong(
    "environment", "LD_LIBRARY_PATH is not the same on b", "Open MPI's mpiexec -x LD_LIBRARY_PATH"
)
def folder_is_missing(bench: Bench) -> Setup:
    bench.patch.setenv("LD_LIBRARY_PATH", "/opt/one:/opt/two")
    there = {"LD_LIBRARY_PATH": "/opt/mpi:/opt/two"}
    return two_hosts([rank_on("a"), rank_on("b", **there)])


@wrong("a job over the hosts", "elsewhere than expected: 3 ranks, expected 4", "unset variables")
def one_is_missing(bench: Bench) -> Setup:
    return two_hosts([rank_on("a")] * 3)


def three_hosts(computing: float = 0.004, network: float = 0.010) -> Setup:
    """Return a setup with three hosts, the second of which takes these times, in seconds."""
    speeds = {
        "computing": [0.004, 0.005, computing, 0.004],
        "network": [0.012, 0.0, network, 0.010],
    }
    return Setup(
        hosts=[("a", 2), ("b", 1), ("c", 1)], outcomes={("speeds", "hosts"): Outcome(speeds)}
    )


@wrong("slow hosts", "b: network takes 31.0 ms (median 12.0 ms)", "ethtool")
def slow_link(bench: Bench) -> Setup:
    return three_hosts(network=0.031)


@wrong("slow hosts", "b: computing takes 13.0 ms (median 5.0 ms), network takes 40.0 ms", "(top)")
def slow_in_all(bench: Bench) -> Setup:
    return three_hosts(computing=0.013, network=0.040)


@wrong("slow hosts", "no answer within", "firewall")
def link_hangs(bench: Bench) -> Setup:
    return failing(three_hosts(), "speeds", "no answer within 60 s")


@wrong("all-reduce over the hosts", "hierarchical: ValueError: no", "that is exact (naive)")
def wrong_over_the_hosts(bench: Bench) -> Setup:
    setup = two_hosts()
    means = {"naive": "", "hierarchical": "ValueError: no"}
    setup.outcomes["communicators", "hosts"] = Outcome(means)
    return setup


@wrong("network", "no answer within", "firewall")
def link_is_down(bench: Bench) -> Setup:
    return failing(two_hosts(), "exchange", "no answer within 60 s")


@wrong("gradients of the model", "no answer within", "firewall")
def link_is_down_later(bench: Bench) -> Setup:
    setup = failing(two_hosts(), "settings", "no answer within 60 s")
    setup.parameters = 1e6
    return setup


# ---- the tests ----


@pytest.mark.parametrize(("name", "found", "remedy", "spoil"), CASES)
def test_what_is_wrong_is_found(
    name: str, found: str, remedy: str, spoil: Spoil, bench: Bench
) -> None:
    finding = BY_NAME[name].examine(spoil(bench))
    assert finding.status is Status.BAD, finding
    assert found in finding.found
    assert remedy in f"{finding.remedy}: {finding.command}"


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ({"Python": "3.11.2"}, "Python: a: 3.12.1; b: 3.11.2"),
        ({"numpy": "2.3.0"}, "numpy: a: 2.4.6; b: 2.3.0"),
        ({"chainer": None}, "chainer: a: 7.8.1; b: none"),
        ({"cupy-cuda13x": "14.0"}, "cupy-cuda13x: a: none; b: 14.0"),
        ({"mpiexec": "none"}, "mpiexec: a: 5.0.2; b: none"),
    ],
)
def test_software_that_differs(there: dict[str, Any], found: str) -> None:
    software = {name: it for name, it in {**SOFTWARE, **there}.items() if it is not None}
    finding = BY_NAME["same software"].examine(two_hosts(software=software))
    assert (finding.status, finding.found) == (Status.BAD, found)
    assert "install the same environment" in finding.remedy


def test_every_check_has_a_case() -> None:
    assert {case.values[0] for case in CASES} == set(BY_NAME)


# ---- what is not wrong ----


def test_fine_hosts() -> None:
    setup = two_hosts()
    measured = (*("slow hosts", "all-reduce over the hosts", "network", "gradients of the model"),)
    for check in CHECKS:
        if check.subject == "hosts" and check.name not in measured:
            finding = check.examine(setup)
            assert finding.status is Status.GOOD, (check.name, finding)


def test_host_is_asked_by_ssh(bench: Bench) -> None:
    bench.command("ssh", SSH.format(before="echo welcome", prefix=""))
    setup = Setup(hosts=[("elsewhere", 1)], script=Path(__file__), data=Path(__file__).parent)
    facts = setup.facts["elsewhere"].facts
    assert facts["software"]["Python"] == platform.python_version()
    assert facts["software"]["numpy"] == metadata.version("numpy")
    assert set(facts["files"]) == {__file__, str(Path(__file__).parent)}
    for name in ("ssh without a password", "same software", "files"):
        assert BY_NAME[name].examine(setup).status is Status.GOOD, name


def test_containers_are_told_how_to_get_gpus() -> None:
    finding = BY_NAME["GPUs"].examine(after(cuda=driver(cuda="", gpus=[])))
    assert finding.status is Status.NOT_TRIED
    assert "docker run --gpus all" in finding.found


@pytest.mark.each_mpi
def test_gpus_that_are_fine(bench: Bench) -> None:
    fake_cupy(bench, nccl="nccl=SimpleNamespace(get_version=lambda: 22705)")
    # As `from cupy.cuda import nccl` needs a package.
    text = (bench.path / "modules" / "cupy.py").read_text()
    bench.module("cupy", text + "import sys; sys.modules['cupy.cuda'] = cuda\n")
    setup = after(cuda=driver())
    found = {check.name: check.examine(setup) for check in CHECKS if check.subject == "GPU"}
    assert {finding.status for finding in found.values()} == {Status.GOOD}, found
    assert found["GPUs"].found == "H200; the driver supports CUDA up to 13.0"
    assert found["CuPy"].found == "cupy-cuda13x 14.2.0, CUDA 13.0"
    assert found["NCCL"].found == "2.27.5"
    assert found["CUDA-aware MPI"].found == (
        "two ranks exchange GPU memory; to use this, run: export CHAINERMN_CUDA_AWARE=1"
    )
    bench.patch.setenv("CHAINERMN_CUDA_AWARE", "1")
    assert BY_NAME["CUDA-aware MPI"].examine(setup) == good("two ranks exchange GPU memory")


@pytest.mark.each_mpi
def test_mpi_need_not_be_cuda_aware(bench: Bench) -> None:
    fake_cupy(bench, use="raise SystemExit(5)")
    finding = BY_NAME["CUDA-aware MPI"].examine(after(cuda=driver()))
    assert finding.status is Status.NOT_TRIED
    assert "not needed: gradients travel by NCCL" in finding.found


@pytest.mark.each_mpi
def test_mpiexec_need_not_be_on_path(bench: Bench) -> None:
    bench.patch.setenv("PATH", str(bench.path))
    finding = BY_NAME["mpiexec of that MPI"].examine(Setup())
    assert finding.status is Status.GOOD
    assert finding.found.endswith("mpiexec; it is not on PATH, but chainermn launch finds it")


def test_files_that_nobody_has_named_are_not_looked_for() -> None:
    assert BY_NAME["files"].examine(Setup()) == not_tried(
        "no files named: use --script and --data"
    )


@pytest.mark.parametrize("name", ["files", "cores and GPUs"])
def test_hosts_that_do_not_answer_are_no_second_finding(name: str) -> None:
    setup = two_hosts()
    setup.__dict__["facts"] = {host: Answer(unreachable="No route to host") for host in "ab"}
    assert BY_NAME[name].examine(setup) == not_tried("no host answered")


# ---- how fast the network is ----


def test_hosts_that_are_as_fast(bench: Bench) -> None:
    finding = BY_NAME["slow hosts"].examine(three_hosts(computing=0.012, network=0.024))
    assert finding.status is Status.GOOD
    assert finding.found.endswith("as the median: computing 5.0 ms, network 12.0 ms")
    of_two = BY_NAME["slow hosts"].examine(two_hosts())
    assert of_two == not_tried("to find out which host is slow, name at least 3 hosts")


def test_many_hosts_are_one_line() -> None:
    names = [f"host{number:02}" for number in range(64)]
    setup = Setup(hosts=[(name, 1) for name in names])
    setup.__dict__["facts"] = {name: Answer({**FACTS, "host": name}) for name in names}
    setup.facts["host07"].facts["software"] = {**SOFTWARE, "numpy": "2.0.0"}
    setup.facts["host63"].facts["cores"] = 0
    expected = {
        "ssh without a password": "host[00-63]",
        "same software": "numpy: host[00-06,08-63]: 2.4.6; host07: 2.0.0",
        "cores and GPUs": "host63: ranks: 1, cores: 0, GPUs: 0",
    }
    assert {name: BY_NAME[name].examine(setup).found for name in expected} == expected


@pytest.mark.parametrize(
    ("in_bfloat16", "advice"),
    [
        pytest.param(0.009, "'two_dimensional'", id="fast"),
        pytest.param(0.008, "'two_dimensional'", id="just as long as it may take"),
        pytest.param(0.005, "'two_dimensional', allreduce_grad_dtype='bfloat16'", id="slow"),
    ],
)
def test_network(in_bfloat16: float, advice: str) -> None:
    setup = two_hosts()
    measured = {"flat": {"float32": 0.02}, "two_dimensional": {"float32": 0.01}}
    measured["two_dimensional"]["bfloat16"] = in_bfloat16
    answer = {"use": "two_dimensional", "seconds": measured}
    setup.outcomes["exchange", "hosts"] = Outcome(answer)
    assert BY_NAME["network"].examine(setup) == good(
        f"on CPU, use create_communicator({advice}). 1 MiB of gradients: flat 20.0 ms, "
        f"two_dimensional 10.0 ms (in bfloat16 {in_bfloat16 * 1e3:.1f} ms)"
    )


@pytest.mark.parametrize(
    ("seconds", "said", "advice"),
    [
        pytest.param(
            [(0.001, 0.011), (0.001, 0.006), (0.002, 0.003)],
            ["1 s with float32", "0.5 s with bfloat16", "0.1 s with PowerSGD"],
            "use the first of these that does, float32, bfloat16, PowerSGD; or",
            id="slow",
        ),
        pytest.param(
            [(0.0001, 0.0011), (0.0001, 0.001), (0.002, 0.004)],
            ["0.1 s with float32", "0.09 s with bfloat16", "0.2 s with PowerSGD"],
            "Use float32: nothing else is clearly faster",
            id="fast",
        ),
        pytest.param(
            [(0.001, 0.011), (0.001, 0.01), (0.002, 0.003)],
            ["1 s with float32", "0.9 s with bfloat16", "0.1 s with PowerSGD"],
            "use the first of these that does, float32, PowerSGD; or",
            id="one does not help",
        ),
        pytest.param(
            [(0.002, 0.001), (0.002, 0.001), (0.002, 0.002)],
            ["0.002 s with float32"],
            "Use float32",
            id="noise",
        ),
    ],
)
def test_gradients_of_a_model(
    seconds: list[tuple[float, float]], said: list[str], advice: str
) -> None:
    setup = two_hosts()
    setup.parameters = 26.1e6
    names = ("float32", "bfloat16", "PowerSGD")
    answer = {
        name: [(1000, few), (262_000, many)]
        for name, (few, many) in zip(names, seconds, strict=True)
    }
    setup.outcomes["settings", "hosts"] = Outcome(answer)
    finding = BY_NAME["gradients of the model"].examine(setup)
    assert finding.status is Status.GOOD
    assert finding.found.startswith("26.1 million gradients take about ")
    assert [each for each in said if each not in finding.found] == []
    assert advice in finding.found


def test_gradients_without_their_number() -> None:
    finding = BY_NAME["gradients of the model"].examine(two_hosts())
    assert finding.status is Status.NOT_TRIED
    assert "--parameters" in finding.found


def test_nothing_leaves_one_host() -> None:
    one_host = Setup(hosts=[("a", 4)], parameters=1e6)
    assert "do not need compression" in BY_NAME["gradients of the model"].examine(one_host).found
    for finding in (
        BY_NAME["network"].examine(Setup(hosts=[("a", 4)])),
        BY_NAME["ssh without a password"].examine(Setup(ranks=4)),
    ):
        assert "allreduce_grad_dtype" in finding.found


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "create_communicator divides the cores among the ranks of a host"),
        ({"OMP_NUM_THREADS": "2"}, "OMP_NUM_THREADS=2"),
        ({"OMP_NUM_THREADS": " 2 , 8"}, "OMP_NUM_THREADS= 2 , 8"),
        (
            {"OMP_NUM_THREADS": "01", "MKL_NUM_THREADS": "2"},
            "OMP_NUM_THREADS=01, MKL_NUM_THREADS=2",
        ),
    ],
)
def test_threads_that_fit(variables: dict[str, str], found: str, bench: Bench) -> None:
    for name, value in variables.items():
        bench.patch.setenv(name, value)
    bench.cores(4)
    assert BY_NAME["threads"].examine(Setup(ranks=2)) == good(found)


def test_one_thread_is_right_even_for_more_ranks_than_cores(bench: Bench) -> None:
    bench.patch.setenv("OMP_NUM_THREADS", "1")
    bench.cores(2)
    assert BY_NAME["threads"].examine(Setup(ranks=4)).status is Status.GOOD


@pytest.mark.parametrize("variable", THREAD_VARIABLES)
@pytest.mark.parametrize("value", ["abc", "0", "", "-1", "1.5", "0,2", "2 2"])
def test_numbers_of_threads_that_are_nonsense(variable: str, value: str, bench: Bench) -> None:
    bench.patch.setenv(variable, value)
    finding = BY_NAME["threads"].examine(Setup())
    expected = f"{variable}={value!r}: expected a number of threads, at least 1"
    assert (finding.status, finding.found) == (Status.BAD, expected)
    assert finding.command == f"unset {variable}"


def test_debian_names_the_mpiexec_of_each_mpi(bench: Bench) -> None:
    bench.no_mpiexec_beside_python()
    bench.command("mpiexec", f"echo '{version_line(OTHER[bench.flavor])}'")
    right = bench.command(f"mpiexec.{bench.flavor}", f"echo '{version_line(bench.flavor)}'")
    finding = BY_NAME["mpiexec of that MPI"].examine(Setup())
    assert finding.remedy == f"start jobs with chainermn launch, or with {right}"
    assert finding.command == ""


def test_a_newer_driver_runs_the_newest_cupy(bench: Bench) -> None:
    install_cupy(bench)
    finding = BY_NAME["CuPy"].examine(after(cuda=driver(cuda="14.1")))
    assert finding.command.endswith(" install 'cupy-cuda13x[ctk]>=14'")


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1)]
)
def test_cores_of_a_container(text: str, cores: int | None, tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    assert host_facts.cores(str(quota)) == (cores or len(os.sched_getaffinity(0)))
