"""All-reduce around a ring of three ranks, in four steps."""

from drawings.svg import Canvas

SIZE = 3
TOP, ROW = 62, 92
STEPS = (
    ("start", ""),
    ("step 1", "add up"),
    ("step 2", "add up"),
    ("step 3", "hand on"),
    ("step 4", "hand on"),
)


def draw() -> Canvas:
    canvas = Canvas(460, TOP + ROW * 4 + 44)
    canvas.text(10, 20, "each sends", kind="note", anchor="start")
    canvas.text(10, 36, "to the next", kind="note", anchor="start")
    for rank in range(SIZE):
        canvas.text(left_of(rank) + 57, 28, f"rank {rank}", kind="strong")
    # Whose elements each rank has added up, for each shard.
    parts = [[{rank} for _ in range(SIZE)] for rank in range(SIZE)]
    draw_row(canvas, 0, parts)
    for step in range(2 * (SIZE - 1)):
        before = [[set(ranks) for ranks in shards] for shards in parts]
        for rank in range(SIZE):
            to, shard = (rank + 1) % SIZE, (rank - step) % SIZE
            parts[to][shard] |= before[rank][shard]
            y = TOP + ROW * step
            begin, end = (left_of(each) + 38 * shard + 18 for each in (rank, to))
            canvas.arrow((begin, y + 34), (end, y + ROW - 2), kind="accent")
        draw_row(canvas, step + 1, parts)
    return canvas


def left_of(rank: int) -> int:
    return 92 + 124 * rank


def draw_row(canvas: Canvas, step: int, parts: list[list[set[int]]]) -> None:
    y = TOP + ROW * step
    name, note = STEPS[step]
    canvas.text(10, y + (8 if note else 17), name, anchor="start")
    if note:
        canvas.text(10, y + 26, note, kind="note", anchor="start")
    for rank, shards in enumerate(parts):
        for shard, ranks in enumerate(shards):
            number = sum(10**each * (shard + 1) for each in ranks)
            kind = {1: "data", SIZE: "gradient"}.get(len(ranks), "model")
            canvas.box(left_of(rank) + 38 * shard, y, 36, 34, str(number), kind=kind)
