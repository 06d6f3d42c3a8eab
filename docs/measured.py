"""Figures of the benchmarks, for pages beside those that ``nox -s benchmarks`` writes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

RAW = Path(__file__).parent / "results/raw"
_MPI = {"mpich": "MPICH", "openmpi": "Open MPI"}


def files() -> list[Path]:
    """Return what the tables are made of."""
    return sorted(RAW.glob("exchange-*.json"))


def exchange_times() -> Iterator[str]:
    """Yield the lines of a table in Markdown for each MPI: milliseconds of each communicator."""
    for path in files():
        content = json.loads(path.read_text())
        groups = [
            group for group in content["groups"] if not group["title"].endswith("1 rank, one host")
        ]
        names = [row["name"] for row in groups[0]["rows"] if _is_a_communicator(row["name"])]
        titles = [name.removeprefix("ours ") for name in names]
        mpi = _MPI[path.stem.partition("-")[2]]
        yield f"| ms, {mpi} | {' | '.join(f'`{title}`' for title in titles)} |"
        yield f"|---|{'---:|' * len(names)}"
        for group in groups:
            by_name = {row["name"]: row["seconds"] for row in group["rows"]}
            cells = [_milliseconds(by_name.get(name)) for name in names]
            yield f"| {group['title']} | {' | '.join(cells)} |"
        yield ""
        yield f"Medians, {content['about']['date']}: {content['about']['machine']}."
        yield ""


def _is_a_communicator(name: str) -> bool:
    return name.startswith("ours ") and "," not in name and name != "ours default"


def _milliseconds(seconds: list[float] | None) -> str:
    return f"{1e3 * statistics.median(seconds):.3g}" if seconds else "refuses"
