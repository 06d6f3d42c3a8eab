"""A timeline written by a real job: spans nest, and an iteration's parts add up to it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

RANKS = 3
ITERATIONS = 6
TRACKS = ["MainThread", "exchange 1", "exchange 2"]


class Node(NamedTuple):
    name: str
    start: int  # microseconds
    end: int
    parts: list[Node]

    def inside(self) -> Iterator[Node]:
        for part in self.parts:
            yield part
            yield from part.inside()

    def named(self, name: str) -> list[Node]:
        return [node for node in self.inside() if node.name == name]


def tree(spans: list[dict[str, Any]]) -> Node:
    """Return a track's spans as a tree; fail if two overlap but neither contains the other."""
    around = [Node("the track", 0, 1 << 62, [])]
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        node = Node(span["name"], span["ts"], span["ts"] + span["dur"], [])
        while around[-1].end <= node.start:
            around.pop()
        assert node.end <= around[-1].end, f"{node.name} sticks out of {around[-1].name}"
        around[-1].parts.append(node)
        around.append(node)
    return around[0]


@pytest.fixture(scope="module")
def events(recorded):
    return json.loads(recorded.read_text())["traceEvents"]


@pytest.fixture(scope="module")
def by_track(events):
    """Return the spans by rank and track, in the order of the file."""
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], names[event["pid"], event["tid"]]].append(event)
    return found


@pytest.fixture(scope="module")
def main_tracks(by_track):
    return [tree(by_track[rank, "MainThread"]) for rank in range(RANKS)]


def test_each_rank_has_its_tracks(by_track):
    assert sorted(by_track) == [(rank, track) for rank in range(RANKS) for track in TRACKS]


def test_a_process_has_the_name_of_its_rank(events):
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.split(" on ")[0] for name in names] == [f"rank {rank}" for rank in range(RANKS)]


def test_no_thread_has_the_number_of_another_one(events):
    # Perfetto tells threads apart by this number alone; a main thread has that of its process.
    numbers = [
        (e["tid"], e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"
    ]
    assert len({number for number, _, _ in numbers}) == RANKS * len(TRACKS)
    main = [(number, rank) for number, rank, name in numbers if name == "MainThread"]
    assert main == [(rank, rank) for rank in range(RANKS)]


def test_spans_nest_and_no_two_beside_each_other_overlap(by_track):
    for (_, track), spans in by_track.items():
        assert len(list(tree(spans).inside())) == len(spans), track


def test_the_check_of_this_file_sees_spans_that_overlap():
    inner = {"name": "inner", "ts": 5, "dur": 5}
    outer = {"name": "outer", "ts": 0, "dur": 10}
    [found] = tree([inner, outer]).parts
    assert [part.name for part in found.parts] == ["inner"]
    with pytest.raises(AssertionError, match="inner sticks out of outer"):
        tree([inner | {"dur": 6}, outer])


def test_the_parts_of_an_iteration_add_up_to_it(by_track, main_tracks):
    for rank, track in enumerate(main_tracks):
        spans = [span for span in by_track[rank, "MainThread"] if span["name"] == "iteration"]
        assert [span["args"]["iteration"] for span in spans] == [1, 2, 3, 4, 5, 6]
        for iteration in track.named("iteration"):
            parts = sum(part.end - part.start for part in iteration.parts)
            assert parts == iteration.end - iteration.start


def test_an_iteration_has_the_parts_of_the_training(main_tracks):
    for track in main_tracks:
        found = Counter(
            (number, node.name)
            for number, iteration in enumerate(track.named("iteration"), 1)
            for node in iteration.inside()
        )
        always = ("data", "convert", "forward", "backward", "extensions")
        assert all(found[n, name] == 1 for n in range(1, ITERATIONS + 1) for name in always)
        assert [n for n, name in sorted(found) if name == "evaluation"] == [3, 6]
        assert [n for n, name in sorted(found) if name == "checkpoint"] == [4]


def test_layers_are_inside_forward_and_backward(main_tracks):
    for track in main_tracks:
        for forward in track.named("forward"):
            [predictor] = forward.named("predictor (Sequential)")
            assert len([node for node in predictor.parts if node.name.endswith("(Linear)")]) == 4
        for backward in track.named("backward"):
            assert len(backward.named("Classifier: SoftmaxCrossEntropy")) == 1


def test_an_exchange_has_a_track_of_its_own(by_track):
    for track in TRACKS[1:]:
        spans = [by_track[rank, track] for rank in range(RANKS)]
        counts = [sum(span["name"] == "all-reduce" for span in of_rank) for of_rank in spans]
        assert counts[0] >= ITERATIONS - 2
        assert counts == counts[:1] * RANKS
