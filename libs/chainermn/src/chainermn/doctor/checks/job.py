"""Check the job that you want to start: its ranks, their threads, the script and its data."""

from __future__ import annotations

import os

from chainermn.doctor import host_facts
from chainermn.doctor.registry import Finding, bad, check, good, not_tried
from chainermn.doctor.setup import Setup
from chainermn.launch.hosts import show_by_host
from chainermn.process import THREAD_VARIABLES

_NO_ANSWER = "no host answered"


@check("job", "cores and GPUs")
def cores_and_gpus(setup: Setup) -> Finding:
    """Check that every host has a core for each of its ranks, and a GPU if it has GPUs."""
    shown, crowded = {}, {}
    for host, ranks in setup.places:
        if facts := setup.facts[host].facts:
            cores, gpus = facts["cores"], facts["gpus"]
            number = "not known, as nvidia-smi does not answer" if gpus is None else gpus
            shown[host] = f"ranks: {ranks}, cores: {cores}, GPUs: {number}"
            if ranks > cores or 0 < (gpus or 0) < ranks:
                crowded[host] = shown[host]
    if crowded:
        return bad(
            show_by_host(crowded),
            "start at most one rank per core and, on GPUs, one rank per GPU; choose each rank's "
            "GPU with chainermn.choose_device(comm)",
        )
    return good(show_by_host(shown)) if shown else not_tried(_NO_ANSWER)


@check("job", "files")
def files(setup: Setup) -> Finding:
    """Check that every host has the same script and data at the same path."""
    if not (setup.script or setup.data):
        return not_tried("no files named: use --script and --data")
    by_host = {host: each.facts["files"] for host, each in setup.facts.items() if each.facts}
    if not by_host:
        return not_tried(_NO_ANSWER)
    shown, wrong = [], []
    for path in next(iter(by_host.values())):
        found = {host: files[path] for host, files in by_host.items()}
        if "missing" in found.values() or len(set(found.values())) > 1:
            wrong.append(show_by_host({host: f"{path}: {found[host]}" for host in found}))
        shown.append(f"{path}: {next(iter(found.values()))}")
    if wrong:
        return bad("; ".join(wrong), "copy it to every host, or share its folder")
    return good("; ".join(shown))


@check("job", "threads")
def threads(setup: Setup) -> Finding:
    """Check the number of threads per rank that environment variables set."""
    ranks, cores, wrong = setup.ranks or 1, host_facts.cores(), {}
    told = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    for name, value in told.items():
        # OpenMP takes a list: a number for each level of nested parallel regions.
        first = value.partition(",")[0].strip()
        number = int(first) if first.isdecimal() else 0
        if number == 0:
            wrong[name] = f"{name}={value!r}: expected a number of threads, at least 1"
        elif number > max(1, cores // ranks):
            wrong[name] = f"{name}={value}: {ranks * number} threads in total on {cores} cores"
    if wrong:
        return bad(
            "; ".join(wrong.values()),
            "let create_communicator divide the cores among the ranks of a host",
            f"unset {' '.join(wrong)}",
        )
    shown = ", ".join(f"{name}={value}" for name, value in told.items())
    return good(shown or "create_communicator divides the cores among the ranks of a host")
