"""Forward, backward, all-reduce, update on two ranks, in time."""

from drawings.svg import Canvas

STEPS = ("forward", "backward", "update")


def draw() -> Canvas:
    canvas = Canvas(500, 330)
    for rank in (0, 1):
        x = 70 + 220 * rank
        canvas.text(x + 80, 16, f"rank {rank}", kind="strong")
        canvas.box(x, 34, 160, 34, "forward", kind="model")
        canvas.arrow((x + 80, 68), (x + 80, 90))
        canvas.box(x, 92, 160, 34, "backward", kind="model")
        canvas.arrow((x + 80, 126), (x + 80, 168))
        canvas.text(x + 88, 147, "own gradients", kind="note", anchor="start")
        canvas.arrow((x + 80, 208), (x + 80, 250))
        canvas.text(x + 88, 229, "mean gradients", kind="note", anchor="start")
        canvas.box(x, 252, 160, 34, "update", kind="model")
    canvas.box(70, 170, 380, 38, "all-reduce: sum over the ranks, / 2", kind="gradient")
    canvas.arrow((30, 34), (30, 286))
    canvas.text(30, 16, "time", kind="note")
    canvas.text(260, 310, "the replicas are equal again", kind="note")
    return canvas
