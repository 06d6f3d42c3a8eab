"""Read and write spans in the Trace Event Format, which Perfetto and Chrome show.

Processes are ranks, and threads are tracks. See "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import bisect
import gzip
import io
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chainermn import spans
from chainermn.files import check_form, parse_json, read_bytes
from chainermn.profiling.timeline import conversions
from chainermn.profiling.timeline.clocks import Clock
from chainermn.profiling.timeline.waiting import Call, waits
from chainermn.spans import Span

_FORMAT = "chainermn timeline 1"

#: Largest file that `read` accepts, also when unpacked. It takes several times as much memory.
MOST_BYTES = 1 << 29
# Forms that the JSON must have; see `files.check_form`.
_CONTENT = {
    "traceEvents": [{"name": str, "ph": str}],
    "otherData": {"format": {_FORMAT}, "hosts": {str: str}},
}
_THREAD = {"pid": int, "tid": int, "args": {"name": str}}
_SPAN = {"pid": int, "tid": int, "ts": range(1 << 60), "dur": range(1 << 60)}
_CALL = {"stream": str, "number": int}

#: Explanation for a timeline without iterations.
WHY_NO_ITERATIONS = (
    "either nothing was trained (perhaps a snapshot of the last epoch was loaded), or "
    "CHAINERMN_TIMELINE_ITERATIONS names iterations that were not reached, or the training "
    "loop does not mark them with chainermn.spans.span('iteration')"
)


class Recorded(NamedTuple):
    """The spans of a rank, on its host's clock."""

    rank: int
    host: str
    spans: Sequence[Span]
    clock: Clock


def write(path: str | os.PathLike[str], ranks: Sequence[Recorded]) -> None:
    """Write the spans of all ranks, converted to the first host's clock.

    Parameters
    ----------
    path : path
        File to write, compressed with gzip if its name ends with ``.gz``. Perfetto opens both.
    ranks : sequence of Recorded
        Spans of each rank.
    """
    tracks = [_aligned(rank) for rank in ranks]
    with_waits = [
        [*track, *waiting] for track, waiting in zip(tracks, _waiting(tracks), strict=True)
    ]
    begin = min((span.start for track in with_waits for span in track), default=0)
    events: list[dict[str, Any]] = []
    for rank, track in zip(ranks, with_waits, strict=True):
        events += _events(rank, track, begin, len(ranks))
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "format": _FORMAT,
            "hosts": {str(rank.rank): rank.host for rank in ranks},
            "clocks": {rank.host: _in_microseconds(rank.clock) for rank in ranks},
        },
    }
    path = Path(path)
    text = json.dumps(content, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


class Timeline(NamedTuple):
    """The contents of a file."""

    #: Spans by rank, on one clock.
    spans: dict[int, list[Span]]
    #: Hosts by rank.
    hosts: dict[int, str]


def read(path: str | os.PathLike[str]) -> Timeline:
    """Read a file that `write` wrote.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If the file is not a timeline.
    """
    data = read_bytes(path, MOST_BYTES)
    try:
        if data.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise ValueError(f"more than {MOST_BYTES} bytes when unpacked")
        return _timeline_of(parse_json(data, "content", _CONTENT))
    except (ValueError, OSError, EOFError, zlib.error) as error:
        message = f"{path} is not a timeline written by chainermn ({error})"
        raise ValueError(message) from error


def _timeline_of(content: dict[str, Any]) -> Timeline:
    hosts = content["otherData"]["hosts"]
    ranks = range(len(hosts))
    if set(hosts) != set(map(str, ranks)):
        raise ValueError(f"expected the hosts of ranks 0 to {len(hosts) - 1}, got other ranks")
    _check_printable(*hosts.values(), *(event["name"] for event in content["traceEvents"]))
    names: dict[tuple[int, int], str] = {}
    found: dict[int, list[Span]] = {rank: [] for rank in ranks}
    for i, event in enumerate(content["traceEvents"]):
        if event["name"] == "thread_name":
            check_form(event, _THREAD, "content", "traceEvents", i)
            _check_printable(event["args"]["name"])
            names[event["pid"], event["tid"]] = event["args"]["name"]
    for i, event in enumerate(content["traceEvents"]):
        if event["ph"] == "X":
            check_form(event, _SPAN, "content", "traceEvents", i)
            details = event.setdefault("args", {})
            check_form(event, {"args": dict}, "content", "traceEvents", i)
            if "stream" in details:
                check_form(details, _CALL, "content", "traceEvents", i)
                _check_printable(details["stream"])
            if event["name"] == conversions.NAME:
                check_form(details, conversions.FORM, "content", "traceEvents", i)
                _check_printable(details["function"], details["link"])
            if event["name"] == "iteration" and not event["dur"]:
                raise ValueError(f"event {i} is an iteration that takes no time")
            rank, thread = event["pid"], event["tid"]
            if (rank, thread) not in names or rank not in found:
                raise ValueError(
                    f"event {i} has rank {rank} and thread {thread}, which have no name"
                )
            start, end = 1000 * event["ts"], 1000 * (event["ts"] + event["dur"])
            found[rank].append(Span(event["name"], names[rank, thread], start, end, details))
    return Timeline(found, {int(rank): host for rank, host in hosts.items()})


def _check_printable(*names: str) -> None:
    for name in names:
        if not name.isprintable():  # control characters could control the terminal
            raise ValueError(f"expected names of printable characters, got {name!r:.50}")


def _in_microseconds(clock: Clock) -> dict[str, float]:
    """Return the offsets that were added to a host's times, and their largest error."""
    start, end = clock.start.offset / 1000, clock.end.offset / 1000
    return {"start": start, "end": end, "error": clock.error / 1000}


def _aligned(rank: Recorded) -> list[Span]:
    correct = rank.clock.corrected
    return [span._replace(start=correct(span.start), end=correct(span.end)) for span in rank.spans]


def _waiting(tracks: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Return the parts of calls in which ranks waited for another one."""
    calls = [[span for span in track if "stream" in span.details] for track in tracks]
    found = waits(
        [
            [Call(c.details["stream"], c.details["number"], c.start, c.end) for c in of_rank]
            for of_rank in calls
        ]
    )
    waiting: list[list[Span]] = []
    for track, of_rank, its_waits in zip(tracks, calls, found, strict=True):
        starts = sorted((span.track, span.start) for span in track)
        waiting.append([])
        for call, wait in zip(of_rank, its_waits, strict=True):
            if wait is not None:
                # Work inside the call starts after the wait; clocks that differ may say otherwise.
                inside = _first_after(starts, call)
                until = min(wait.until, inside, call.end)
                name = f"waiting for rank {wait.rank}"
                waiting[-1].append(Span(name, call.track, call.start, until))
    return waiting


def _first_after(starts: Sequence[tuple[str, int]], call: Span) -> int:
    """Return the start of the first span on a call's track after the start of the call."""
    index = bisect.bisect_right(starts, (call.track, call.start))
    is_there = index < len(starts) and starts[index][0] == call.track
    return starts[index][1] if is_there else call.end


def _events(
    rank: Recorded, track: Iterable[Span], begin: int, size: int
) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank: names first, then spans, with outer ones before inner ones."""
    by_track: defaultdict[str, list[Span]] = defaultdict(list)
    for span in track:
        by_track[span.track].append(span)
    yield _label("process_name", rank.rank, 0, f"rank {rank.rank} on {rank.host}")
    yield _label("process_sort_index", rank.rank, 0, rank.rank)
    names = sorted(by_track, key=lambda name: (name != spans.MAIN, name))
    for place, name in enumerate(names):
        # Perfetto takes the thread whose number is that of the process for its main thread.
        number = place * size + rank.rank
        yield _label("thread_name", rank.rank, number, name)
        yield _label("thread_sort_index", rank.rank, number, place)
        for span in _filled(sorted(by_track[name], key=lambda span: (span.start, -span.end))):
            # Use whole microseconds, because viewers round fractions differently.
            start, end = (span.start - begin) // 1000, (span.end - begin) // 1000
            event = {"name": span.name, "ph": "X", "pid": rank.rank, "tid": number}
            event |= {"ts": start, "dur": end - start}
            yield event | ({"args": dict(span.details)} if span.details else {})


def _filled(ordered: Sequence[Span]) -> Iterator[Span]:
    """Yield spans, outer ones first, and fill gaps in iterations with spans named "other"."""
    iteration: Span | None = None
    reached = 0
    for span in ordered:
        if iteration is not None and span.start >= reached:
            if (until := min(span.start, iteration.end)) > reached:
                yield Span("other", iteration.track, reached, until)
            reached = span.end
        if span.name == "iteration":
            iteration, reached = span, span.start
        yield span
    if iteration is not None and iteration.end > reached:
        yield Span("other", iteration.track, reached, iteration.end)


def _label(kind: str, pid: int, tid: int, value: Any) -> dict[str, Any]:
    key = "sort_index" if kind.endswith("sort_index") else "name"
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {key: value}}
