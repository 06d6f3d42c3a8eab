"""A snapshot that rank 0 writes for all, and more ranks that resume from it."""

from drawings.svg import Canvas


def draw() -> Canvas:
    canvas = Canvas(460, 312)
    for rank in (0, 1):
        canvas.box(10 + 150 * rank, 10, 140, 46, f"rank {rank}", "replica", kind="model")
    canvas.text(450, 33, "two ranks train", kind="strong", anchor="end")
    canvas.arrow((80, 56), (80, 99), kind="accent")
    canvas.text(92, 77, "rank 0 writes it for all", kind="accent", anchor="start")
    lines = (
        "snapshot_iter_48.0: parameters, state of the",
        "optimizer, epoch, position in the data",
    )
    canvas.box(10, 100, 440, 50, *lines, kind="data")
    canvas.text(92, 180, "all read it", kind="accent", anchor="start")
    for rank in range(3):
        x = 10 + 150 * rank
        canvas.arrow((x + 70, 150), (x + 70, 211), kind="accent")
        canvas.box(x, 212, 140, 46, f"rank {rank}", "replica", kind="model")
    canvas.text(230, 284, "three ranks resume", kind="strong")
    return canvas
