"""Print the processes on this host that inherited ``NAME=VALUE``, as JSON.

Run on every host of a job, ``python marked.py NAME VALUE`` shows what is left of it.
"""

from __future__ import annotations

import json
import sys

import psutil

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")


def main(name: str, value: str) -> None:
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get(name) != value or process.status() == psutil.STATUS_ZOMBIE:
                continue
            command = " ".join(process.cmdline())
            ranks = [environment[key] for key in RANK_VARIABLES if key in environment]
            rank = int(ranks[0]) if ranks else None
            found.append((process.pid, process.ppid(), rank, command))
        except psutil.Error:  # it has just ended, or belongs to somebody else
            continue
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
