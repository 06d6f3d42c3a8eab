"""Check several hosts: that each is reachable, matches the others, and can run ranks of a job."""

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

#: Variables that change how MPI, Python, NCCL or this library behave on a host.
VARIABLES = re.compile(
    r"LD_LIBRARY_PATH|PYTHON(PATH|HOME|HASHSEED)|CHAINER.*|CUDA_.*|CUPY_.*|NCCL_.*|MPICH_.*|MV2_.*|FI_.*|UCX_.*"
    r"|.*_NUM_THREADS"
)
#: What to do if mpiexec says these words; the last entry is for everything else.
_REMEDIES = {
    "unable to get host address": "list the names and addresses of all hosts in the /etc/hosts of "
    "each, or name the hosts by their addresses",
    "unable to change wdir": "start the job in a folder that every host has at the same path",
    "": "let the hosts connect to each other on any port; check their firewalls. If several hosts "
    "have the same address, such as Docker's, use --network to tell Open MPI which network "
    "connects them",
}
#: A host counts as slow if it takes this many times as long as the median.
SLOW = 2.5
#: Fewest hosts to compare: with two, nobody can tell which one makes the link slow.
ENOUGH = 3
_FIREWALL = "check whether a firewall or a second network card drops packets"


@check("hosts", "ssh without a password")
def ssh(setup: Setup) -> Finding:
    """Check that this host can start processes on the others."""
    if not setup.hosts:
        return not_tried(
            "no hosts named; to check several, use --hostfile or --host. On one host, you do not "
            "need allreduce_grad_dtype"
        )
    closed = {name: a.unreachable for name, a in setup.facts.items() if a.unreachable}
    if not closed:
        return good(show_hosts(setup.facts))
    first, why = next(iter(closed.items()))
    if why == NO_SSH:
        return bad(why, "install an ssh client, such as Debian's openssh-client")
    if "Permission denied" in why or "verification failed" in why:
        cure = f"run ssh {first} by hand to accept its key; run ssh-copy-id {first} to send yours"
    else:
        cure = f"check that {first} is the right name, and that the host is up and runs sshd"
    return bad(
        show_by_host(closed),
        f"{cure}; after that, this command must work",
        f"ssh -o BatchMode=yes {first} true",
    )


@check("hosts", "same software", needs=["ssh without a password"])
def same_software(setup: Setup) -> Finding:
    """Check that Python, mpiexec and packages have the same path and version on every host."""
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
    """Check that hosts have different names, and that ranks start on them in order."""
    names = {host: answer.facts["host"] for host, answer in setup.facts.items()}
    for name in names.values():
        if len(alike := [host for host in names if names[host] == name]) > 1:
            return bad(
                f"{' and '.join(alike)} call themselves {name}: their ranks seem to share a host",
                f"if they are the same host, name it once, as in --host {alike[0]}:2; otherwise "
                "give each a different name: hostnamectl set-hostname NAME (docker run --hostname "
                "NAME)",
            )
    outcome = setup.probe_hosts("ranks")
    if outcome.failure:
        remedy = next(text for words, text in _REMEDIES.items() if words in outcome.failure)
        return bad(outcome.failure, remedy)
    expected = [names[host] for host, ranks in setup.hosts or () for _ in range(ranks)]
    actual = [rank["host"] for rank in outcome.answer]
    if actual != expected:
        return bad(
            f"ranks run elsewhere than expected: {_show_ranks(actual, expected)}",
            "unset variables that change where MPI places ranks, such as "
            "PRTE_MCA_rmaps_default_mapping_policy or HYDRA_RANKMAP",
        )
    return good(f"{len(actual)} ranks, in the order of the hosts")


@check("hosts", "environment", needs=["a job over the hosts"])
def environment(setup: Setup) -> Finding:
    """Check that ranks on other hosts get the variables that are set here."""
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
            f"start the job with chainermn launch {forward}, or with Open MPI's mpiexec {export}",
        )
    return good(", ".join(wanted) or "none of the variables that matter is set")


@check("hosts", "slow hosts", needs=["a job over the hosts"])
def slow_hosts(setup: Setup) -> Finding:
    """Find hosts that compute or communicate much more slowly than most."""
    hosts = setup.hosts or ()
    if len(hosts) < ENOUGH:
        return not_tried(f"to find out which host is slow, name at least {ENOUGH} hosts")
    outcome = setup.probe_hosts("speeds")
    if outcome.failure:
        return bad(outcome.failure, _FIREWALL)
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
                found = f"{what} takes {seconds * 1e3:.1f} ms (median {usual[what] * 1e3:.1f} ms)"
                slow[host] = f"{slow[host]}, {found}" if host in slow else found
    if slow:
        return bad(
            show_by_host(slow),
            "in every iteration, all hosts wait for the slowest one: check the speed of its link "
            "(ethtool, iperf3) and what else runs there (top), or leave it out",
        )
    said = ", ".join(f"{what} {seconds * 1e3:.1f} ms" for what, seconds in usual.items())
    return good(f"no host takes {SLOW} times as long as the median: {said}")


@check("hosts", "all-reduce over the hosts", needs=["a job over the hosts", "all-reduce"])
def all_reduce(setup: Setup) -> Finding:
    """Check that every communicator that can run on these hosts computes exact means."""
    return judge_means(setup.probe_hosts("communicators"))


@check("hosts", "network", needs=["all-reduce over the hosts"], blames=["slow hosts"])
def network(setup: Setup) -> Finding:
    """Measure the exchange of gradients, and recommend a communicator and a wire dtype."""
    if len(setup.hosts or ()) < 2:
        return good("all ranks are on one host, so you do not need allreduce_grad_dtype")
    outcome = setup.probe_hosts("exchange")
    if outcome.failure:
        return bad(outcome.failure, _FIREWALL)
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
    """Estimate how long the gradients of the user's model take, and recommend a faster way."""
    if setup.parameters is None:
        return not_tried(
            "to find out how to send your model's gradients, give its number of parameters with "
            "--parameters"
        )
    if len(setup.hosts or ()) < 2:
        return good("all ranks are on one host, so gradients do not need compression")
    outcome = setup.probe_hosts("settings")
    if outcome.failure:
        return bad(outcome.failure, _FIREWALL)
    times = {how: _time_of(setup.parameters, *two) for how, two in outcome.answer.items()}
    first, *others = times
    worth_it = [first]
    for how in others:
        if times[how] < WORTH_IT * times[worth_it[-1]]:
            worth_it.append(how)
    advice = f"Use {first}: nothing else is clearly faster"
    if len(worth_it) > 1:
        advice = (
            "Overlap hides an exchange that takes less time than backward: use the first of these "
            f"that does, {', '.join(worth_it)}; or exchange less often, with accumulate=8 or "
            "local=chainermn.optimizers.LocalSGD(period=8). The guide 'Slow networks' says how "
            "each affects the accuracy"
        )
    said = ", ".join(f"{time:.2g} s with {how}" for how, time in times.items())
    return good(f"{setup.parameters / 1e6:.3g} million gradients take about {said}. {advice}")


def _time_of(parameters: float, few: tuple[int, float], many: tuple[int, float]) -> float:
    """Estimate the seconds for some gradients, on a straight line through two measurements."""
    seconds_of_each = max(0.0, many[1] - few[1]) / (many[0] - few[0])
    return few[1] + seconds_of_each * (parameters - few[0])


def _show_ranks(actual: Sequence[str], expected: Sequence[str]) -> str:
    if len(actual) != len(expected):
        return f"{len(actual)} ranks, expected {len(expected)}"
    pairs = enumerate(zip(actual, expected, strict=True))
    rank, (there, right) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
    return f"rank {rank} on {there}, expected {right}"


def _contains(there: str | None, here: str) -> bool:
    """Tell whether a variable has the same value there, or at least the same folders."""
    return there is not None and set(here.split(os.pathsep)) <= set(there.split(os.pathsep))
