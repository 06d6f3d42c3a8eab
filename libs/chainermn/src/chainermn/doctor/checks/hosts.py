"""Several hosts: whether each can be reached, is like the others, and takes part in a job."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from statistics import median

from chainermn.doctor.checks.mpi import judge_means
from chainermn.doctor.probes import WORTH_IT
from chainermn.doctor.registry import Finding, bad, check, good, not_tried
from chainermn.doctor.setup import NO_SSH, Setup
from chainermn.launch.hosts import show_by_host, show_hosts

#: MPI, Python or NCCL behave differently on a host where one of these differs.
VARIABLES = re.compile(
    r"LD_LIBRARY_PATH|PYTHON(PATH|HOME|HASHSEED)|CHAINER.*|CUDA_.*|CUPY_.*|NCCL_.*|MPICH_.*|MV2_.*|FI_.*|UCX_.*"
    r"|.*_NUM_THREADS"
)
#: A host is slow that takes so many times as long as the median.
SLOW = 2.5
#: How many hosts there have to be: of two, nobody can tell which one makes a link slow.
ENOUGH = 3


@check("hosts", "ssh without a password")
def ssh(setup: Setup) -> Finding:
    """Check that this host can start processes on the others."""
    if not setup.hosts:
        return not_tried(
            "no hosts named: use --hostfile or --host. Nothing leaves this host, so "
            "allreduce_grad_dtype is not needed"
        )
    closed = {name: a.no_way_in for name, a in setup.facts.items() if a.no_way_in}
    if not closed:
        return good(show_hosts(setup.facts))
    first, why = next(iter(closed.items()))
    if why == NO_SSH:
        return bad(why, "install an ssh client, such as Debian's openssh-client")
    if "Permission denied" in why or "verification failed" in why:
        cure = f"ssh {first} once by hand, to accept its key; ssh-copy-id {first}"
    else:
        cure = f"check that {first} is its name, and that it is up and runs sshd"
    return bad(
        show_by_host(closed), f"{cure}; then this must work", f"ssh -o BatchMode=yes {first} true"
    )


@check("hosts", "same software", needs=["ssh without a password"])
def same_software(setup: Setup) -> Finding:
    """Check that Python, mpiexec and packages are at the same path, in the same version."""
    remedy = "install the same environment at the same path on every host, or share its folder"
    if absent := {name: a.no_python for name, a in setup.facts.items() if a.no_python}:
        return bad(show_by_host(absent), remedy)
    by_host = {host: answer.facts["software"] for host, answer in setup.facts.items()}
    names = dict.fromkeys(name for software in by_host.values() for name in software)
    versions = {name: {h: by_host[h].get(name, "none") for h in by_host} for name in names}
    if different := [name for name in names if len(set(versions[name].values())) > 1]:
        return bad(
            " | ".join(f"{name}: {show_by_host(versions[name])}" for name in different), remedy
        )
    return good(", ".join(f"{name} {next(iter(versions[name].values()))}" for name in names))


@check("hosts", "a job over the hosts", needs=["same software", "two ranks"])
def job(setup: Setup) -> Finding:
    """Check that hosts have names of their own, and that ranks start on each, in their order."""
    names = {host: answer.facts["host"] for host, answer in setup.facts.items()}
    for name in names.values():
        if len(alike := [host for host in names if names[host] == name]) > 1:
            return bad(
                f"{' and '.join(alike)} call themselves {name}: their ranks seem to share a host",
                f"if they are one host, name it once, as in --host {alike[0]}:2; else give each a "
                "name of its own: hostnamectl set-hostname NAME (docker run --hostname NAME)",
            )
    outcome = setup.probe_hosts("ranks")
    if outcome.failure:
        return bad(
            outcome.failure,
            "let the hosts connect to each other on any port: look for firewalls. If several "
            "hosts have the same address, such as Docker's, tell Open MPI by --network which "
            "network joins them",
        )
    expected = [names[host] for host, ranks in setup.hosts or () for _ in range(ranks)]
    actual = [rank["host"] for rank in outcome.answer]
    if actual != expected:
        return bad(
            f"ranks run elsewhere than expected: {_show_ranks(actual, expected)}",
            "unset variables that make MPI place ranks otherwise, such as "
            "PRTE_MCA_rmaps_default_mapping_policy or HYDRA_RANKMAP",
        )
    return good(f"{len(actual)} ranks, in the order of the hosts")


@check("hosts", "environment", needs=["a job over the hosts"])
def environment(setup: Setup) -> Finding:
    """Check that ranks on other hosts have the variables that are set here."""
    wanted = sorted(n for n in os.environ if VARIABLES.fullmatch(n) or n in setup.forward)
    lost = {}
    for name in wanted:
        there = {r["host"]: r["environment"].get(name) for r in setup.probe_hosts("ranks").answer}
        if on := [host for host in there if not _contains(there[host], os.environ[name])]:
            lost[name] = show_hosts(on)
    if lost:
        forward, export = (" ".join(f"{o} {name}" for name in lost) for o in ("--forward", "-x"))
        return bad(
            "; ".join(f"{name} is not the same on {on}" for name, on in lost.items()),
            f"start the job by chainermn launch {forward}, or by mpiexec {export} of Open MPI",
        )
    return good(", ".join(wanted) or "no variable is set that would matter")


@check("hosts", "slow hosts", needs=["a job over the hosts"])
def slow_hosts(setup: Setup) -> Finding:
    """Find hosts whose link or whose computing is much slower than that of most."""
    hosts = setup.hosts or ()
    if len(hosts) < ENOUGH:
        return not_tried(f"name at least {ENOUGH} hosts, to be told which of them is slow")
    outcome = setup.probe_hosts("speeds")
    if outcome.failure:
        return bad(outcome.failure, "see what a firewall or a second network card drops")
    of_ranks = [host for host, ranks in hosts for _ in range(ranks)]
    usual: dict[str, float] = {}
    slow: dict[str, str] = {}
    for what, by_rank in outcome.answer.items():
        taken: dict[str, float] = {}
        for host, seconds in zip(of_ranks, by_rank, strict=True):
            taken[host] = max(taken.get(host, 0.0), seconds)
        usual[what] = median(taken.values())
        for host, seconds in taken.items():
            if seconds > SLOW * usual[what]:
                found = f"{what} takes {seconds * 1e3:.1f} ms, most {usual[what] * 1e3:.1f} ms"
                slow[host] = f"{slow[host]}, {found}" if host in slow else found
    if slow:
        return bad(
            show_by_host(slow),
            "all wait for the slowest host in each iteration: look at the speed of its link "
            "(ethtool, iperf3) and at what else runs there (top), or leave it out",
        )
    said = ", ".join(f"{what} {seconds * 1e3:.1f} ms" for what, seconds in usual.items())
    return good(f"none takes {SLOW} times as long as the median: {said}")


@check("hosts", "all-reduce over the hosts", needs=["a job over the hosts", "all-reduce"])
def all_reduce(setup: Setup) -> Finding:
    """Check that every communicator that can run there computes exact means."""
    return judge_means(setup.probe_hosts("communicators"))


@check("hosts", "network", needs=["all-reduce over the hosts"], blames=["slow hosts"])
def network(setup: Setup) -> Finding:
    """Measure the exchange of gradients, and recommend a communicator and a wire dtype."""
    if len(setup.hosts or ()) < 2:
        return good("all ranks are on one host: nothing leaves it, no allreduce_grad_dtype needed")
    outcome = setup.probe_hosts("exchange")
    if outcome.failure:
        return bad(outcome.failure, "see what a firewall or a second network card drops")
    seconds: dict[str, dict[str, float]] = outcome.answer["seconds"]
    name = outcome.answer["use"]
    arguments = repr(name)
    if seconds[name]["bfloat16"] < WORTH_IT * seconds[name]["float32"]:
        arguments += ", allreduce_grad_dtype='bfloat16'"
    measured = ", ".join(
        f"{name} {by['float32'] * 1e3:.1f} ms"
        + (f" (in bfloat16 {by['bfloat16'] * 1e3:.1f} ms)" if "bfloat16" in by else "")
        for name, by in seconds.items()
    )
    return good(f"on CPU, use create_communicator({arguments}). 1 MiB of gradients: {measured}")


@check("hosts", "gradients of the model", needs=["network"], blames=["slow hosts"])
def gradients(setup: Setup) -> Finding:
    """Say how long the gradients of the user's model take, and what would make that shorter."""
    if setup.parameters is None:
        return not_tried(
            "say by --parameters how many the model has, to be told how to send its gradients"
        )
    if len(setup.hosts or ()) < 2:
        return good("all ranks are on one host, where they are exchanged as they are")
    outcome = setup.probe_hosts("settings")
    if outcome.failure:
        return bad(outcome.failure, "see what a firewall or a second network card drops")
    times = {how: _time_of(setup.parameters, *two) for how, two in outcome.answer.items()}
    first, *others = times
    worth_it = [first]
    for how in others:
        if times[how] < WORTH_IT * times[worth_it[-1]]:
            worth_it.append(how)
    advice = f"Use {first}: nothing else is clearly faster"
    if len(worth_it) > 1:
        advice = (
            "Overlap hides what is shorter than backward: use the first for which that is so, of "
            f"{', '.join(worth_it)}; or exchange less often, by accumulate=8 or "
            "local=chainermn.optimizers.LocalSGD(period=8). The page 'Slow networks' of the "
            "documentation says what each does to the accuracy"
        )
    said = ", ".join(f"{time:.2g} s with {how}" for how, time in times.items())
    return good(f"those of {setup.parameters / 1e6:.3g} million take about {said}. {advice}")


def _time_of(parameters: float, few: tuple[int, float], many: tuple[int, float]) -> float:
    """Return seconds for so many gradients, on the straight line through two measurements."""
    seconds_of_each = max(0.0, many[1] - few[1]) / (many[0] - few[0])
    return few[1] + seconds_of_each * (parameters - few[0])


def _show_ranks(actual: Sequence[str], expected: Sequence[str]) -> str:
    if len(actual) != len(expected):
        return f"{len(actual)} of them, expected {len(expected)}"
    pairs = enumerate(zip(actual, expected, strict=True))
    rank, (there, right) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
    return f"rank {rank} on {there}, expected {right}"


def _contains(there: str | None, here: str) -> bool:
    """Tell whether a variable has the same value there, or lists at least the same folders."""
    return there is not None and set(here.split(os.pathsep)) <= set(there.split(os.pathsep))
