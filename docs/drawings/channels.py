"""Two ranks with some output channels of each layer."""

from drawings.svg import Canvas


def draw() -> Canvas:
    canvas = Canvas(470, 376)
    for rank, part in enumerate(("0 to 4", "5 to 10")):
        x = 10 + 240 * rank
        canvas.text(x + 105, 16, f"rank {rank}", kind="strong")
        for y, layer, channels in (
            (34, "second", "output channels"),
            (166, "third", "output channels"),
            (238, "last", "input channels"),
        ):
            canvas.box(x, y, 210, 42, layer, f"{channels} {part}", kind="model")
        for y in (76, 280):
            canvas.arrow((x + 105, y), (x + 105, y + 24))
        canvas.arrow((x + 105, 142), (x + 105, 164))
        canvas.arrow((x + 105, 208), (x + 105, 236))
        canvas.arrow((x + 105, 338), (x + 105, 360))
    canvas.box(10, 102, 450, 40, "allgather: all channels on each rank", kind="gradient")
    canvas.box(10, 306, 450, 32, "allreduce: the sum of both on each rank", kind="gradient")
    return canvas
