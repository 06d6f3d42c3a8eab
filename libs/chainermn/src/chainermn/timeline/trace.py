"""Files of spans in the Trace Event Format, which Perfetto and Chrome show.

A process is a rank, a thread is a track. See "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import bisect
import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chainermn import spans
from chainermn.spans import Span
from chainermn.timeline.clocks import Clock
from chainermn.timeline.waiting import Call, waits

_FORMAT = "chainermn timeline 1"

#: What people can do about a timeline without iterations.
WHY_NO_ITERATIONS = (
    "either nothing was trained, or CHAINERMN_TIMELINE_ITERATIONS names iterations that did not "
    "come, or the training loop does not mark them by chainermn.spans.span('iteration')"
)


class Recorded(NamedTuple):
    """What a rank has done, by its host's clock."""

    rank: int
    host: str
    spans: Sequence[Span]
    clock: Clock


def write(path: str | os.PathLike[str], ranks: Sequence[Recorded]) -> None:
    """Write what all ranks have done, as the first host's clock had it.

    Parameters
    ----------
    path : path
        Compressed by gzip if its name ends with ``.gz``; Perfetto opens both.
    ranks : sequence of Recorded
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
    """What is in a file."""

    #: By rank, on one clock.
    spans: dict[int, list[Span]]
    #: By rank.
    hosts: dict[int, str]


def read(path: str | os.PathLike[str]) -> Timeline:
    """Return what is in a file that `write` wrote.

    Raises
    ------
    ValueError
        If the file is not one of those.
    """
    data = Path(path).read_bytes()
    try:
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        if content["otherData"]["format"] != _FORMAT:
            raise KeyError
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        raise ValueError(f"{path}: not a timeline that chainermn has written") from error
    names: dict[tuple[int, int], str] = {}
    hosts = {int(rank): host for rank, host in content["otherData"]["hosts"].items()}
    found: dict[int, list[Span]] = {rank: [] for rank in hosts}
    for event in content["traceEvents"]:
        if event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            start, end = 1000 * event["ts"], 1000 * (event["ts"] + event["dur"])
            track = names[event["pid"], event["tid"]]
            found[event["pid"]].append(
                Span(event["name"], track, start, end, event.get("args", {}))
            )
    return Timeline(found, hosts)


def _in_microseconds(clock: Clock) -> dict[str, float]:
    """Return what was added to the times of a host, and the error of that at most."""
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
                # What the rank does in the call cannot have begun before, except by the clocks.
                inside = _first_after(starts, call)
                until = min(wait.until, inside, call.end)
                name = f"waiting for rank {wait.rank}"
                waiting[-1].append(Span(name, call.track, call.start, until))
    return waiting


def _first_after(starts: Sequence[tuple[str, int]], call: Span) -> int:
    """Return when the first span after the start of a call starts, on its track."""
    index = bisect.bisect_right(starts, (call.track, call.start))
    is_there = index < len(starts) and starts[index][0] == call.track
    return starts[index][1] if is_there else call.end


def _events(
    rank: Recorded, track: Iterable[Span], begin: int, size: int
) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank: names first, then spans, outer ones before inner ones."""
    by_track: defaultdict[str, list[Span]] = defaultdict(list)
    for span in track:
        by_track[span.track].append(span)
    yield _label("process_name", rank.rank, 0, f"rank {rank.rank} on {rank.host}")
    yield _label("process_sort_index", rank.rank, 0, rank.rank)
    names = sorted(by_track, key=lambda name: (name != spans.MAIN, name))
    for place, name in enumerate(names):
        # For Perfetto thread 0 of any process is its main thread, whose number is the process's.
        number = place * size + rank.rank
        yield _label("thread_name", rank.rank, number, name)
        yield _label("thread_sort_index", rank.rank, number, place)
        for span in _filled(sorted(by_track[name], key=lambda span: (span.start, -span.end))):
            # In whole microseconds, as viewers round fractions in ways of their own.
            start, end = (span.start - begin) // 1000, (span.end - begin) // 1000
            event = {"name": span.name, "ph": "X", "pid": rank.rank, "tid": number}
            event |= {"ts": start, "dur": end - start}
            yield event | ({"args": dict(span.details)} if span.details else {})


def _filled(ordered: Sequence[Span]) -> Iterator[Span]:
    """Yield spans, outer ones first, with spans named "other" in what iterations leave open."""
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
