"""Creation and configuration of communicators."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import threadpoolctl
from mpi4py import MPI

import chainermn
from chainermn.communicators import registered
from chainermn.communicators.single_node_communicator import SingleNodeCommunicator
from chainermn.notes import note_once
from chainermn.process import THREAD_VARIABLES, cores
from chainermn.testing.mpiexec import Job, find_mpiexec, mpi_flavor, run_job
from chainermn.transport.gpu import available
from chainermn.transport.host.mpi import load_mpi
from chainermn.transport.topology import Topology

pytestmark = pytest.mark.each_mpi

no_gpu = pytest.mark.skipif(available.why_no_gpu() is None, reason="this machine has a GPU")


@pytest.mark.mpi(1, 2, 3)
def test_unknown_name_lists_the_known_ones() -> None:
    known = "dummy, flat, hierarchical, naive, non_cuda_aware, pure_nccl, single_node, two_dim"
    with pytest.raises(ValueError, match=f"unknown communicator 'fast'; expected one of {known}"):
        chainermn.create_communicator("fast")


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("name", "meant"),
    [("hierachical", "hierarchical"), ("2d_two_dimensional", "two_dimensional"), ("nccl", None)],
)
def test_misspelt_name(name: str, meant: str | None) -> None:
    question = f"(did you mean {meant!r}?); expected one of dummy, " if meant else "; expected one"
    with pytest.raises(ValueError, match=f"unknown communicator {name!r}") as caught:
        chainermn.create_communicator(name)
    assert question in str(caught.value)


@pytest.mark.mpi(2)
def test_another_name_on_another_rank_raises_on_both() -> None:
    with pytest.raises(ValueError, match=r"disagree.*rank 0: 'naive'.*rank 1: 'flat'"):
        chainermn.create_communicator(["naive", "flat"][MPI.COMM_WORLD.rank])


@pytest.mark.mpi(1, 2)
@no_gpu
def test_default_without_gpu_says_nothing(
    recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(chainermn.create_communicator(), SingleNodeCommunicator)
    assert len(recwarn) == 0
    assert "communicator" not in capfd.readouterr().err


@pytest.mark.mpi(2)
@pytest.mark.parametrize("without", [0, 1])
def test_default_warns_on_rank_0_if_only_some_ranks_have_a_gpu(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, without: int
) -> None:
    reason = "there is no CUDA device" if MPI.COMM_WORLD.rank == without else None
    monkeypatch.setattr(available, "why_no_gpu", lambda: reason)
    monkeypatch.setattr(available, "why_no_nccl", lambda: reason)
    comm = chainermn.create_communicator()
    assert isinstance(comm, SingleNodeCommunicator)
    assert len(recwarn) == (comm.rank == 0)
    for warning in recwarn:
        assert warning.filename == __file__  # the line that creates the communicator
        assert str(warning.message).startswith(f"on rank {without}, there is no CUDA device: ")
        assert "by the communicator 'single_node'" in str(warning.message)


@pytest.mark.mpi(4)
@no_gpu
@pytest.mark.parametrize(
    ("hosts", "name"), [("aabb", "two_dimensional"), ("abbb", "hierarchical")]
)
def test_default_on_several_hosts(monkeypatch: pytest.MonkeyPatch, hosts: str, name: str) -> None:
    host = hosts[MPI.COMM_WORLD.rank]
    monkeypatch.setattr("chainermn.transport.topology.host_name", lambda: host)
    with chainermn.create_communicator() as comm:
        assert type(comm) is registered()[name]


@pytest.mark.mpi(1, 2)
@no_gpu
def test_pure_nccl_refuses_on_every_rank() -> None:
    with pytest.raises(RuntimeError, match="needs a GPU for each rank: on rank 0, "):
        chainermn.create_communicator("pure_nccl")


@pytest.mark.mpi(2)
def test_wire_dtype_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"must be float16, bfloat16, .*int32"):
        chainermn.create_communicator("naive", allreduce_grad_dtype="int32")


@pytest.mark.mpi(2, 4)
def test_some_of_the_ranks() -> None:
    world = MPI.COMM_WORLD
    half = world.Split(world.rank % 2, world.rank)
    with chainermn.create_communicator("flat", half) as comm:
        assert comm.size == world.size // 2
        assert comm.mpi_comm is half
        expected = [rank for rank in range(world.size) if rank % 2 == world.rank % 2]
        assert comm.allgather_obj(world.rank) == expected
    half.Free()


@pytest.mark.mpi(1)
def test_settings() -> None:
    comm, other = (chainermn.create_communicator("naive") for _ in range(2))
    assert comm.get_config() == {"allreduce_grad_dtype": None, "batched_copy": True}
    comm.set_config("batched_copy", False)
    comm.set_config("allreduce_grad_dtype", np.float16)
    assert comm.get_config("batched_copy") is False
    assert comm.allreduce_grad_dtype == np.float16
    assert other.get_config() == {"allreduce_grad_dtype": None, "batched_copy": True}
    with pytest.raises(ValueError, match="unknown setting 'speed'; NaiveCommunicator has: "):
        comm.set_config("speed", 11)
    with pytest.raises(ValueError, match="unknown setting 'speed'"):
        comm.get_config("speed")
    assert not comm.within_config_scope
    with comm.config_scope():
        assert comm.within_config_scope
        comm.speed = 11  # type: ignore[attr-defined]
    assert comm.get_config("speed") == 11
    with pytest.raises(ValueError, match="unknown setting 'speed'"):
        other.get_config("speed")


def threads() -> set[int]:
    """Return the thread counts of BLAS and of OpenMP, which oneDNN uses."""
    return {library["num_threads"] for library in threadpoolctl.threadpool_info()}


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize(("n_cores", "bound"), [(1, False), (8, False), (9, False), (9, True)])
def test_cores_are_divided(monkeypatch: pytest.MonkeyPatch, n_cores: int, bound: bool) -> None:
    for variable in THREAD_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    all_cores = range(n_cores)
    usable = frozenset(all_cores[rank::size] if bound else all_cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
    expected = max(1, len(usable) if bound else n_cores // size)
    with threadpoolctl.threadpool_limits(5):
        before = threads()
        cores.divide_cores(MPI.COMM_WORLD, Topology.of(MPI.COMM_WORLD).inter_rank)
        assert threads() == (before if size == 1 else {expected})


@pytest.mark.mpi(4)
def test_more_ranks_than_cores_are_noted_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    world = MPI.COMM_WORLD
    note_once.cache_clear()  # earlier tests may have printed these notes
    for hosts, usable, crowd, limit in (
        ("aaaa", {0, 1}, "4 ranks share 2 cores on a", 2),
        ("aaaa", {0, 1}, "", 2),  # already said
        ("aaaa", {5}, "4 ranks share 1 core on a", 1),
        ("aaaa", {0, 1, 2, 3}, "", 4),
        ("aaaa", {world.rank}, "", 1),  # each rank is bound to its own core
        ("abbb", {0, 1, 2}, "", 3),
        ("abbb", {3, 4}, "3 ranks share 2 cores on b", 2),
        ("aabb", {3}, "2 ranks share 1 core on a, and likewise on 1 other host", 1),
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, usable=usable: usable)
        monkeypatch.setattr(socket, "gethostname", lambda hosts=hosts: hosts[world.rank])
        with threadpoolctl.threadpool_limits(5):
            cores.divide_cores(world, Topology.from_hosts(hosts, world.rank).inter_rank)
        advice = f"they take turns. Start at most {limit} there for speed."
        said = f"chainermn: note: {crowd}: {advice}\n" if crowd and world.rank == 0 else ""
        assert capfd.readouterr().err == said


TAKING_TURNS = ["MPIR_CVAR_ENABLE_HEAVY_YIELD", "OMPI_MCA_mpi_yield_when_idle"]
# The user has chosen for rank 1.
CROWDED = f"""
import os, chainermn
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
for name in {TAKING_TURNS}:
    os.environ.pop(name, None)
    if rank == "1":
        os.environ[name] = "0"
os.sched_getaffinity = lambda _: {{0}}
for name in ("naive", "flat"):
    comm = chainermn.create_communicator(name)
chosen = [os.environ.get(name) for name in {TAKING_TURNS}]
os.write(1, f"{{comm.rank}} of {{comm.size}}: {{chosen}}\\n".encode())
"""


def test_crowded_ranks_take_turns_and_results_of_tests_leave_the_note_out() -> None:
    job = Job(2, ["-c", CROWDED])
    job.process.wait(timeout=300)
    written, result = job.output()[1], job.wait(300).check()
    assert written.count("chainermn: note: 2 ranks share 1 core on ") == 1
    assert sorted(result.stdout.splitlines()) == ["0 of 2: ['1', '1']", "1 of 2: ['0', '0']"]


@pytest.mark.mpi(4)
def test_split_leaves_the_division_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in THREAD_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    with threadpoolctl.threadpool_limits(5):
        comm = chainermn.create_communicator("naive")
        assert threads() == {2}
        comm.split(comm.rank % 2, comm.rank)
        assert threads() == {2}


@pytest.mark.mpi(2)
@pytest.mark.parametrize("variable", THREAD_VARIABLES)
def test_threads_chosen_by_the_user_stay(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "3")
    with threadpoolctl.threadpool_limits(3):
        before = threads()
        chainermn.create_communicator("naive")
        assert threads() == before


def test_without_mpiexec() -> None:
    code = (
        "import chainermn, numpy as np\n"
        "comm = chainermn.create_communicator('naive')\n"
        "assert (comm.rank, comm.size) == (0, 1)\n"
        "assert comm.allreduce(np.ones(3)).tolist() == [1, 1, 1]\n"
    )
    # Like a shell, without the variables of the mpiexec that runs this test.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "PMIX"))}
    settings = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    subprocess.run([sys.executable, "-c", code], env={**clean, **settings}, check=True)


def test_import_does_not_initialize_mpi() -> None:
    code = (
        "import sys, chainermn\n"
        "assert 'mpi4py.MPI' not in sys.modules\n"
        "assert 'cupy' not in sys.modules or 'cupy.cuda.nccl' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


USUAL = f"""
import json, os, sys, chainer, chainermn, numpy as np
from pathlib import Path
from chainermn.transport.host import mpi
for name in {TAKING_TURNS}:
    os.environ.pop(name, None)
mpi.cores_of_job = lambda: 2
comm = chainermn.create_communicator("naive")
model = chainer.links.Linear(2, 3)
model.cleargrads()
model.W.grad = np.ones((3, 2), "f")
comm.multi_node_mean_grad(model)
taking_turns = [name for name in {TAKING_TURNS} if name in os.environ]
found = [comm.size, taking_turns, sorted(sys.modules)]
Path(str(comm.rank)).write_text(json.dumps(found))
"""


def test_usual_job_takes_no_turns_and_imports_nothing_rare(tmp_path: Path) -> None:
    run_job(2, ["-c", USUAL], env={"OMP_NUM_THREADS": "1"}, cwd=tmp_path).check()
    unused = {
        "chainermn.compression",
        "chainermn.failures.monitor",
        "chainermn.gradients.overlap",
        "chainermn.profiling",
        "ml_dtypes",
        "threadpoolctl",
    }
    for rank in ("0", "1"):
        size, taking_turns, imported = json.loads((tmp_path / rank).read_text())
        assert (size, taking_turns) == (2, [])
        assert "chainermn.gradients.exchange" in imported
        assert unused.isdisjoint(imported)


def test_mpiexec_of_another_mpi_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = {"mpich": "OMPI_COMM_WORLD_SIZE", "openmpi": "PMI_SIZE"}[mpi_flavor()]
    monkeypatch.setenv(variable, "2")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")  # as if under Slurm
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    with pytest.raises(RuntimeError, match=r"started 2 processes, but each of them is alone"):
        load_mpi()


@pytest.mark.each_mpi
@pytest.mark.parametrize("others", [{}, {"PMI_SIZE": "3"}], ids=["none", "pmi2"])
def test_wrong_option_of_srun_is_named(
    monkeypatch: pytest.MonkeyPatch, others: dict[str, str]
) -> None:
    for name, value in {"SLURM_STEP_NUM_TASKS": "3", **others}.items():
        monkeypatch.setenv(name, value)
    language = {"mpich": "pmi2", "openmpi": "pmix"}[mpi_flavor()]
    with pytest.raises(RuntimeError, match=rf"srun started 3 .* with srun --mpi={language}, or"):
        load_mpi()


@pytest.mark.each_mpi
@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "3", "SLURM_PROCID": "0"},  # in a batch script
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "3"},  # in the shell of salloc
        {"SLURM_STEP_NUM_TASKS": "3", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"},  # mpiexec -n 1
        {"SLURM_STEP_NUM_TASKS": "3", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_one_rank_inside_an_allocation(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert load_mpi().COMM_WORLD.size == 1


def test_no_mpi_library(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import chainermn; chainermn.create_communicator('naive')"
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 1
    assert "RuntimeError: mpi4py cannot load an MPI library: " in shown.stderr
    assert "\nInstall one that it can load: unset MPI4PY_LIBMPI\n" in shown.stderr


def test_mpiexec_is_found_beside_python() -> None:
    assert find_mpiexec().exists()
    assert find_mpiexec().parent == Path(sys.executable).parent
