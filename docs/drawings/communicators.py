"""How gradients of two hosts with two ranks each meet, in three ways."""

from typing import NamedTuple

from drawings.svg import Canvas

SIDE, ROW = 38, 74
HOSTS = 148, 316  # left edges


class Step(NamedTuple):
    """What happens, and between which ranks: from the first to the second, or both ways."""

    name: str
    note: str
    pairs: tuple[tuple[int, int], ...]
    both_ways: bool = True


IN_HOSTS, BETWEEN_HOSTS = ((0, 1), (2, 3)), ((0, 2), (1, 3))
WAYS = {
    "flat, naive": (Step("all-reduce", "of all ranks", IN_HOSTS + BETWEEN_HOSTS),),
    "hierarchical": (
        Step("1. reduce", "to one rank", ((1, 0), (3, 2)), both_ways=False),
        Step("2. all-reduce", "between hosts", ((0, 2),)),
        Step("3. broadcast", "in each host", IN_HOSTS, both_ways=False),
    ),
    "two_dimensional": (
        Step("1. reduce-scatter", "in each host", IN_HOSTS),
        Step("2. all-reduce", "half by each rank", BETWEEN_HOSTS),
        Step("3. all-gather", "in each host", IN_HOSTS),
    ),
}


def draw() -> Canvas:
    canvas = Canvas(460, 32 + sum(36 + ROW * len(steps) for steps in WAYS.values()))
    y = 10
    for name, steps in WAYS.items():
        canvas.text(10, y + 10, name, kind="strong", anchor="start")
        for number, step in enumerate(steps):
            draw_step(canvas, y + 30 + ROW * number, step)
        y += 36 + ROW * len(steps)
    canvas.arrow((30, y + 6), (80, y + 6), both=True)
    canvas.text(90, y + 6, "memory of a host", kind="note", anchor="start")
    canvas.arrow((250, y + 6), (300, y + 6), both=True, kind="accent")
    canvas.text(310, y + 6, "network", kind="note", anchor="start")
    return canvas


def draw_step(canvas: Canvas, y: int, step: Step) -> None:
    canvas.text(10, y + 15, step.name, anchor="start")
    canvas.text(10, y + 34, step.note, kind="note", anchor="start")
    for host in HOSTS:
        canvas.box(host, y, 134, 50, kind="host")
    lefts = [host + 12 + 72 * slot for host in HOSTS for slot in (0, 1)]
    for rank, left in enumerate(lefts):
        canvas.box(left, y + 6, SIDE, SIDE, str(rank), kind="model")
    for one, other in step.pairs:
        if one // 2 != other // 2:
            x, far = (lefts[rank] + SIDE / 2 for rank in (one, other))
            top, bottom = y + 46, y + 58 + 8 * (one % 2)
            path = (x, top), (x, bottom), (far, bottom), (far, top)
            canvas.arrow(*path, both=step.both_ways, kind="accent")
        else:
            left, right = sorted((lefts[one], lefts[other]))
            path = (left + SIDE + 1, y + 25), (right - 1, y + 25)
            canvas.arrow(*(path if one < other else path[::-1]), both=step.both_ways)
