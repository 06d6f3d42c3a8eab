"""All-reduce of one array per rank: a reduce-scatter, then an all-gather."""

from drawings.svg import Canvas

OWN = [[10**rank * shard for shard in (1, 2, 3)] for rank in range(3)]
SUMS = [sum(shards) for shards in zip(*OWN, strict=True)]
SHARDS = range(3)


def draw() -> Canvas:
    canvas = Canvas(460, 332)
    for rank in range(3):
        left = 10 + 157 * rank
        canvas.box(left, 10, 126, 312, kind="rank")
        canvas.text(left + 63, 28, f"rank {rank}", kind="strong")
        for begin, end in ((80, 103), (154, 177), (212, 229), (262, 279)):
            canvas.arrow((left + 63, begin), (left + 63, end))
        for shard in SHARDS:
            x = left + 2 + 42 * shard
            canvas.box(x, 46, 38, 34, str(OWN[rank][shard]), kind="data")
            is_own = shard == rank
            lines = [str(SUMS[shard])] if is_own else []
            canvas.box(x, 178, 38, 34, *lines, kind="gradient" if is_own else "")
            canvas.box(x, 280, 38, 34, str(SUMS[shard]), kind="gradient")
    lines = "reduce-scatter: each rank receives", "its shard from all ranks and adds them up"
    canvas.box(10, 104, 440, 50, *lines)
    canvas.box(10, 230, 440, 32, "all-gather: each rank sends its sum to all")
    return canvas
