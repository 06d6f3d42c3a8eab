"""``chainermn report`` on files with known times."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chainermn.profiling.report import report
from chainermn.profiling.timeline import conversions, trace
from chainermn.profiling.timeline.clocks import Clock, Offset
from chainermn.profiling.timeline.trace import Recorded
from chainermn.spans import MAIN, Span

MS = 10**6


def recorded(rank: int, *, late: int, ahead: int = 0) -> Recorded:
    """Return two iterations of 100 ms, each ending with 30 - ``late`` ms of exchange."""
    found = []

    def add(name: str, start: int, end: int, **details: Any) -> None:
        found.append(Span(name, MAIN, (start + ahead) * MS, (end + ahead) * MS, details))

    for number in range(2):
        begin = 1000 + 100 * number
        add("data", begin, begin + 10 + late)
        add("forward", begin + 10 + late, begin + 70 + late)
        add("multi_node_mean_grad", begin + 70 + late, begin + 100, stream="c", number=number)
        add("iteration", begin, begin + 100, iteration=number + 1)
    offset = Offset(-ahead * MS, 3000, at=0)
    return Recorded(rank, f"host{rank}", found, Clock(offset, offset._replace(at=1)))


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(report, list(map(str, arguments)))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_table_the_efficiency_and_advice(tmp_path: Path, name: str) -> None:
    trace.write(tmp_path / name, [recorded(0, late=0), recorded(1, late=20, ahead=10**6)])
    result = run(tmp_path / name)
    assert result.exit_code == 0, result.output
    title, head, *rows = [line.split() for line in result.output.splitlines()[:5]]
    assert " ".join(title) == "ms per iteration, mean of 2 iterations"
    assert head[:7] == ["rank", "iteration", "data", "compute", "layers", "exchange", "waiting"]
    nothing = ["0.00"] * 4
    assert rows == [
        ["0", "100.00", "10.00", "60.00", "0.00", "10.00", "20.00", *nothing],
        ["1", "100.00", "30.00", "60.00", "0.00", "10.00", "0.00", *nothing],
        ["mean", "100.00", "20.00", "60.00", "0.00", "10.00", "10.00", *nothing],
    ]
    text = " ".join(result.output.split())
    assert "parallel efficiency: 80%" in text
    assert "- 100% of rank 1's iterations wait for data" in text
    assert "rank 1 on host1 keeps the others waiting for 20 ms per iteration" in text


def test_waits_are_in_the_file(tmp_path: Path) -> None:
    ranks = [recorded(0, late=0), recorded(1, late=20, ahead=-500)]
    trace.write(tmp_path / "trace.json", ranks)
    spans = trace.read(tmp_path / "trace.json").spans
    found = [(s.name, s.start, s.end) for s in spans[0] if s.name.startswith("waiting")]
    name = "waiting for rank 1"
    assert found == [(name, 70 * MS, 90 * MS), (name, 170 * MS, 190 * MS)]
    assert not [span for span in spans[1] if span.name.startswith("waiting")]


def test_a_wait_ends_where_the_rank_goes_on(tmp_path: Path) -> None:
    # Clocks agree only to a few microseconds, so rank 1 seems to come later than it did.
    first, second = recorded(0, late=0), recorded(1, late=20)
    inside = Span("all-reduce", MAIN, 1085 * MS, 1100 * MS)
    trace.write(tmp_path / "t.json", [first._replace(spans=[*first.spans, inside]), second])
    found = [s for s in trace.read(tmp_path / "t.json").spans[0] if s.name.startswith("waiting")]
    assert [(s.start, s.end) for s in found] == [(70 * MS, 85 * MS), (170 * MS, 190 * MS)]


def test_the_first_of_many_iterations_is_left_out(tmp_path: Path) -> None:
    one = recorded(0, late=0)
    spans = [
        Span("iteration", MAIN, number * 10 * MS, (number + 1) * 10 * MS, {"iteration": number})
        for number in range(2, 8)
    ]
    first = Span("iteration", MAIN, 0, 20 * MS, {"iteration": 1})
    trace.write(tmp_path / "t.json", [one._replace(spans=[first, *spans])])
    result = run(tmp_path / "t.json")
    assert result.output.startswith("ms per iteration, mean of 7 iterations, without the first")
    assert result.output.splitlines()[2].split()[:2] == ["0", "10.00"]


def test_functions_that_undo_channels_last(tmp_path: Path) -> None:
    def with_marks(rank: int, marks: list[tuple[int, str, str]]) -> Recorded:
        found = recorded(rank, late=0)
        spans = [
            Span(conversions.NAME, MAIN, at * MS, at * MS, {"function": function, "link": link})
            for at, function, link in marks
        ]
        return found._replace(spans=[*found.spans, *spans])

    tile, relu = ("Tile", "/block/conv"), ("ReLU", "")
    ranks = [
        with_marks(0, [(1020, *tile), (1030, *tile), (1120, *tile), (1130, *tile)]),
        # Between iterations, nothing counts; 1,300 is after the last one.
        with_marks(1, [(1020, *tile), (1030, *tile), (1020, *relu), (1300, *relu)]),
    ]
    trace.write(tmp_path / "trace.json", ranks)
    result = run(tmp_path / "trace.json")
    start = "- undoes channels last, so the next convolution converts: "
    assert [line for line in result.output.splitlines() if line.startswith(start)] == [
        f"{start}Tile in /block/conv (1.5 times per iteration)",
        f"{start}ReLU (0.25 times per iteration)",
    ]
    text = (tmp_path / "trace.json").read_text()
    for old, new in (('"Tile"', "3"), ('"Tile"', '"\\u001b"'), ('"link"', '"other"')):
        assert old in text
        (tmp_path / "wrong.json").write_text(text.replace(old, new))
        result = run(tmp_path / "wrong.json")
        assert (result.exit_code, result.stdout) == (1, "")


def test_a_picture(tmp_path: Path) -> None:
    trace.write(tmp_path / "trace.json", [recorded(0, late=0), recorded(1, late=20)])
    result = run(tmp_path / "trace.json", "--picture", tmp_path / "ranks.svg")
    assert result.exit_code == 0, result.output
    assert "<svg" in (tmp_path / "ranks.svg").read_text()
    assert not list(tmp_path.glob(".*"))


def test_a_picture_of_an_unknown_kind(tmp_path: Path) -> None:
    trace.write(tmp_path / "trace.json", [recorded(0, late=0)])
    result = run(tmp_path / "trace.json", "--picture", tmp_path / "ranks.xyz")
    assert result.exit_code == 1
    assert "the picture's name must end with .png" in result.output


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"otherData": {"format": "other"}}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "other.json").write_text(content)
    result = run(tmp_path / "other.json")
    assert result.exit_code == 1
    assert "other.json is not a timeline written by chainermn" in result.output


def test_a_job_that_has_not_trained(tmp_path: Path) -> None:
    trace.write(tmp_path / "trace.json", [recorded(0, late=0)._replace(spans=[])])
    result = run(tmp_path / "trace.json")
    assert result.exit_code == 1
    assert "has no iterations for rank 0: either nothing was trained" in result.output


def test_other_forms_are_refused_in_one_line(tmp_path: Path) -> None:
    trace.write(tmp_path / "right.json", [recorded(0, late=0), recorded(1, late=20)])
    right = (tmp_path / "right.json").read_text()
    path = tmp_path / "a.json"
    named = right.index('"iteration"')
    before = right[:named].count('"name"') - right[:named].count('"args":{"name"') - 1
    for old, new, reason in [
        (
            '"ts":0',
            '"ts":"x"',
            ": 'ts': expected an integer from 0 to 1152921504606846975, got 'x'",
        ),
        ('"dur":100000', '"dur":0', f"event {before} is an iteration that takes no time"),
        ('"args":{"stream"', '"args":5,"other":{"stream"', "'args': expected an object, got 5"),
        ('"number":0', '"number":[]', "'number': expected an integer, got []"),
        (
            '"pid":1,"tid":1,"ts"',
            '"pid":7,"tid":1,"ts"',
            "has rank 7 and thread 1, which have no name",
        ),
        ('"0":"host0"', '"0":0', "'hosts': '0': expected a string, got 0"),
        ('"0":"host0"', '"0":"\\u001b[2J"', r"of printable characters, got '\x1b[2J'"),
        (f'"name":"{MAIN}"', '"name":"\\u001b[2J"', r"of printable characters, got '\x1b[2J'"),
        ('"stream":"', '"stream":"\\u001b', r"of printable characters, got '\x1b"),
        ('"0":"host0"', '"5":"host0"', "expected the hosts of ranks 0 to 1, got other ranks"),
        ('{"traceEvents":', '{"traceEvents":' + 1_000_000 * "[", "content: nested too deeply"),
    ]:
        assert old in right
        path.write_text(right.replace(old, new, 1))
        result = run(path)
        assert (result.exit_code, result.stdout) == (1, ""), result
        start = f"Error: {path} is not a timeline written by chainermn ("
        (line,) = result.stderr.splitlines()
        assert line.startswith(start)
        assert reason in line


READ = """
import resource, sys
from chainermn.profiling.timeline import conversions, trace

trace.MOST_BYTES = 1 << 26  # to be quicker
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    trace.read(sys.argv[1])
except ValueError as error:
    print(error)
"""


def test_timeline_that_unpacks_to_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(bytes(1 << 24)) * 64)
    command = [sys.executable, "-c", READ, path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    reason = "more than 67108864 bytes when unpacked"
    expected = f"{path} is not a timeline written by chainermn ({reason})\n"
    assert done.stdout == expected
