"""The watch: ranks report what they do, and end together when one of them is gone."""

from drawings.svg import Canvas

HOSTS = ("host A", (0, 1)), ("host B", (2, 3))
GONE = 3


def draw() -> Canvas:
    canvas = Canvas(460, 478)
    canvas.text(10, 16, "While it trains:", kind="strong", anchor="start")
    canvas.text(10, 36, "each rank reports about once per second", kind="note", anchor="start")
    draw_hosts(canvas, 52, gone=None)
    canvas.text(10, 236, "Rank 3 is killed:", kind="strong", anchor="start")
    canvas.text(10, 256, "the watch tells all others to end", kind="note", anchor="start")
    draw_hosts(canvas, 272, gone=GONE)
    canvas.box(10, 434, 440, 34, "the job ends with a message that names rank 3", kind="fail")
    return canvas


def draw_hosts(canvas: Canvas, top: int, *, gone: int | None) -> None:
    canvas.box(10, top, 205, 152, kind="host")
    canvas.box(245, top, 205, 152, kind="host")
    canvas.box(25, top + 34, 175, 36, "watch", kind="gradient")
    for host, (name, ranks) in enumerate(HOSTS):
        left = 10 + 235 * host
        canvas.text(left + 102, top + 18, name, kind="strong")
        for slot, rank in enumerate(ranks):
            x, y = left + 15 + 95 * slot, top + 94
            if rank == gone:
                canvas.box(x, y, 80, 44, f"rank {rank}", "is gone", kind="fail")
                continue
            canvas.box(x, y, 80, 44, f"rank {rank}", kind="model")
            # Ranks of the other host reach the watch from the side.
            side = top + 60 - 16 * slot
            path = [
                (x + 40, y),
                *([(x + 40, top + 71)] if host == 0 else [(x + 40, side), (201, side)]),
            ]
            if gone is None:
                canvas.arrow(*path, kind="accent")
            else:
                canvas.arrow(*reversed(path), kind="bad")
