"""Several hosts: that each can be reached, that all have the same, and how a job runs on them."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from chainermn.doctor.checks.mpi import judge_means
from chainermn.doctor.facts import NO_SSH
from chainermn.doctor.registry import Finding, bad, check, good, not_tried
from chainermn.doctor.setup import Setup
from chainermn.launch.mpiexec import mpi_flavour

#: What differs on another host makes MPI, Python or NCCL behave otherwise there.
VARIABLES = re.compile(
    r"LD_LIBRARY_PATH|PYTHON(PATH|HOME|HASHSEED)|CHAINER.*|CUDA_.*|CUPY_.*|NCCL_.*|MPICH_.*|MV2_.*|FI_.*|UCX_.*"
    r"|.*_NUM_THREADS"
)
#: A link that has less than this part of the bandwidth of the best one is slow.
SLOW = 0.25

_SAME = "install the same environment at the same path on every host, or share its folder"
_READY = ("ssh without a password", "same Python", "same mpiexec", "addresses", "two ranks")


@check("hosts", "ssh without a password")
def ssh(setup: Setup) -> Finding:
    """Check that this host can start processes on the others."""
    if not setup.hosts:
        return not_tried("no hosts named: use --hostfile or --host")
    if closed := {name: a.no_way_in for name, a in setup.facts.items() if a.no_way_in}:
        first, why = next(iter(closed.items()))
        if why == NO_SSH:
            return bad(why, "install an ssh client, such as Debian's openssh-client")
        if "Permission denied" in why or "verification failed" in why:
            cure = f"ssh {first} once by hand, to accept its key; ssh-copy-id {first}"
        elif "Could not resolve" in why:
            cure = f"correct the name {first}, or add it to /etc/hosts"
        else:
            cure = f"check that {first} is up, can be reached from here, and runs sshd"
        return bad(
            _list(closed), f"{cure}; then this must work", f"ssh -o BatchMode=yes {first} true"
        )
    return good(", ".join(setup.facts))


@check("hosts", "same Python", needs=["ssh without a password"])
def same_python(setup: Setup) -> Finding:
    """Check that this interpreter is at the same path everywhere."""
    if absent := {name: a.no_python for name, a in setup.facts.items() if a.no_python}:
        return bad(_list(absent), _SAME)
    return _same(setup, "python")


@check("hosts", "same packages", needs=["same Python"])
def same_packages(setup: Setup) -> Finding:
    """Check that the packages that matter are of the same versions."""
    facts = _facts(setup)
    names = sorted({name for each in facts.values() for name in each["packages"]})
    different = []
    for name in names:
        versions = {host: each["packages"].get(name, "none") for host, each in facts.items()}
        if len(set(versions.values())) > 1:
            different.append(f"{name}: {_list(versions)}")
    if different:
        return bad("; ".join(different), _SAME)
    return good(", ".join(names))


@check("hosts", "same mpiexec", needs=["same Python", "mpiexec of that MPI"])
def same_mpiexec(setup: Setup) -> Finding:
    """Check that the mpiexec of this host is on all, at the same path and of the same version."""
    return _same(setup, "mpiexec")


@check("hosts", "same script", needs=["same Python"])
def same_script(setup: Setup) -> Finding:
    """Check that the script is on every host, at the same path."""
    if setup.script is None:
        return not_tried("no script named: use --script")
    return _same(setup, "script", lambda digest: f"{setup.script} (sha256 {digest}...)")


@check("hosts", "same data", needs=["same Python"])
def same_data(setup: Setup) -> Finding:
    """Check that the data are on every host, at the same path."""
    if setup.data is None:
        return not_tried("no data named: use --data")
    return _same(setup, "data", lambda contents: f"{setup.data}: {contents}")


@check("hosts", "places", needs=["same Python"], blames=["cores", "one GPU a rank"])
def places(setup: Setup) -> Finding:
    """Check that every host has a core, and a GPU if it has any, for each of its ranks."""
    shown, crowded = {}, {}
    facts = _facts(setup)
    for host, ranks in setup.hosts or ():
        cores, gpus = facts[host]["cores"], facts[host]["gpus"]
        shown[host] = f"ranks: {ranks}, cores: {cores}, GPUs: {gpus}"
        if ranks > cores or 0 < gpus < ranks:
            crowded[host] = shown[host]
    if crowded:
        return bad(_list(crowded), "put fewer ranks there")
    return good(_list(shown))


@check("hosts", "addresses", needs=["same Python", "mpiexec of that MPI"])
def addresses(setup: Setup) -> Finding:
    """Check that names and addresses differ: Open MPI takes Docker's for a way to another host."""
    facts = _facts(setup)
    own_names = {name: each["host"] for name, each in facts.items()}
    if shared := _shared(own_names):
        name, hosts = next(iter(shared.items()))
        if facts[hosts[0]]["addresses"] == facts[hosts[1]]["addresses"]:
            places = sum(n for host, n in setup.hosts or () if host in hosts)
            return bad(
                f"{' and '.join(hosts)} are one host, {name}",
                f"name it once, with the ranks of both: --host {hosts[0]}:{places}",
            )
        return bad(
            f"{' and '.join(hosts)} call themselves {name}: their ranks seem to share a host",
            "give each host a name of its own: hostnamectl set-hostname NAME "
            "(docker run --hostname NAME)",
        )
    interfaces = [
        (host, interface, ipaddress.ip_interface(address))
        for host, each in facts.items()
        for interface, address in each["addresses"].items()
    ]
    duplicates = _shared({(host, interface): a.ip for host, interface, a in interfaces})
    if not duplicates:
        return good("all different")
    found = "; ".join(
        f"{address} is on " + " and ".join(f"{host} ({interface})" for host, interface in places)
        for address, places in duplicates.items()
    )
    if mpi_flavour() == "mpich":
        return good(f"{found}; MPICH does not mind")
    if setup.network:
        return good(f"{found}; Open MPI is kept to {setup.network}")
    networks = _shared({(h, i): a.network for h, i, a in interfaces if a.ip not in duplicates})
    for_all = [str(n) for n, places in networks.items() if len(dict(places)) == len(facts)]
    network = for_all[0] if for_all else "ADDRESS/BITS of the network that joins the hosts"
    return bad(
        found,
        f"start the job by chainermn launch --network {network}, or by mpiexec --mca "
        f"btl_tcp_if_include {network}",
    )


@check("hosts", "a job over the hosts", needs=_READY)
def job(setup: Setup) -> Finding:
    """Check that ranks start on every host, in the order of the hosts."""
    if setup.tour.failure:
        return bad(
            setup.tour.failure,
            "let the hosts connect to each other on any port: look for firewalls. If they share "
            "several networks, choose one by --network",
        )
    facts = _facts(setup)
    expected = [facts[name]["host"] for name, ranks in setup.hosts or () for _ in range(ranks)]
    actual = [rank["host"] for rank in setup.tour.answer]
    if actual != expected:
        return bad(
            f"ranks run on {', '.join(actual)}; expected {', '.join(expected)}",
            "unset what makes MPI place ranks otherwise, such as "
            "PRTE_MCA_rmaps_default_mapping_policy or HYDRA_RANKMAP",
        )
    return good(f"{len(actual)} ranks, in the order of the hosts")


@check("hosts", "environment", needs=["a job over the hosts"])
def environment(setup: Setup) -> Finding:
    """Check that ranks on other hosts have the variables that are set here."""
    wanted = {
        name: value
        for name, value in os.environ.items()
        if VARIABLES.fullmatch(name) or name in setup.forward
    }
    lost: dict[str, list[str]] = {}
    for rank in setup.tour.answer:
        for name, value in wanted.items():
            hosts = lost.setdefault(name, [])
            if not _contains(rank["environment"].get(name), value) and rank["host"] not in hosts:
                hosts.append(rank["host"])
    lost = {name: hosts for name, hosts in lost.items() if hosts}
    if lost:
        forward, export = (" ".join(f"{o} {name}" for name in lost) for o in ("--forward", "-x"))
        return bad(
            "; ".join(f"{name} is not the same on {', '.join(on)}" for name, on in lost.items()),
            f"start the job by chainermn launch {forward}, or by mpiexec {export} of Open MPI",
        )
    paths = {rank["environment"].get("PATH") for rank in setup.tour.answer}
    found = ", ".join(sorted(wanted)) or "nothing is set that would matter"
    return good(found + ("" if paths == {os.environ.get("PATH")} else "; PATH differs"))


@check("hosts", "all-reduce over the hosts", needs=["a job over the hosts", "all-reduce"])
def all_reduce(setup: Setup) -> Finding:
    """Check that every communicator that can run there computes exact means."""
    hosts = setup.hosts or []
    outcome = setup.probe_ranks("communicators", sum(n for _, n in hosts), hosts)
    return judge_means(outcome, ["float16", "float32", "float64"])


@check("hosts", "links", needs=["a job over the hosts"])
def links(setup: Setup) -> Finding:
    """Measure bandwidth and latency between each pair of hosts, by MPI."""
    hosts = [(name, 1) for name, _ in setup.hosts or ()]
    if len(hosts) < 2:
        return not_tried("there is one host only")
    outcome = setup.probe_ranks("links", len(hosts), hosts)
    if outcome.failure:
        return bad(outcome.failure, "see what a firewall or a second network card drops")
    pairs = {" to ".join(pair["hosts"]): pair for pair in outcome.answer}
    found = _list(
        {
            hosts: f"{pair['bandwidth'] / 1e6:,.0f} MB/s, {pair['latency'] * 1e6:,.0f} µs"
            for hosts, pair in pairs.items()
        }
    )
    best = max(pair["bandwidth"] for pair in pairs.values())
    if slow := [hosts for hosts, pair in pairs.items() if pair["bandwidth"] < SLOW * best]:
        return bad(
            found,
            f"slow: {', '.join(slow)}. ethtool shows the speed of a network card: look at cable "
            "and switch; --network chooses between networks",
        )
    return good(found)


def _facts(setup: Setup) -> dict[str, dict[str, Any]]:
    return {host: answer.facts for host, answer in setup.facts.items()}


def _same(setup: Setup, fact: str, show: Callable[[str], str] = str) -> Finding:
    """Return whether all hosts have a fact, and the same."""
    values = {host: facts[fact] for host, facts in _facts(setup).items()}
    if None in values.values() or len(set(values.values())) > 1:
        shown = {host: "missing" if v is None else show(v) for host, v in values.items()}
        remedy = _SAME if fact in ("python", "mpiexec") else "copy it to every host, or share it"
        return bad(_list(shown), remedy)
    return good(show(next(iter(values.values()))))


def _list(by_host: Mapping[str, str]) -> str:
    return "; ".join(f"{host}: {text}" for host, text in by_host.items())


def _shared(values: Mapping[Any, Any]) -> dict[Any, list[Any]]:
    """Return the values that several keys have, and those keys."""
    keys: dict[Any, list[Any]] = {}
    for key, value in values.items():
        keys.setdefault(value, []).append(key)
    return {value: several for value, several in keys.items() if len(several) > 1}


def _contains(there: str | None, here: str) -> bool:
    """Tell whether a variable has its value there, or a list of folders at least all of it."""
    return there is not None and set(here.split(os.pathsep)) <= set(there.split(os.pathsep))
