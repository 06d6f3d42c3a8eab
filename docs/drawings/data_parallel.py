"""Data parallelism: each rank has the whole model and part of the data."""

from drawings.svg import Canvas


def draw() -> Canvas:
    canvas = Canvas(460, 388)
    canvas.box(10, 10, 440, 36, "your data set", kind="data")
    for rank in (0, 1):
        left, middle = 10 + 230 * rank, 115 + 230 * rank
        canvas.box(left, 72, 210, 306, kind="rank")
        canvas.text(middle, 90, f"rank {rank}", kind="strong")
        canvas.arrow((middle, 46), (middle, 71))
        canvas.box(left + 15, 106, 180, 34, "half of the data", kind="data")
        canvas.arrow((middle, 140), (middle, 161))
        canvas.box(left + 15, 162, 180, 34, "the whole model", kind="model")
        canvas.arrow((middle, 196), (middle, 217))
        canvas.box(left + 15, 218, 180, 34, "own gradients", kind="gradient")
        canvas.arrow((middle, 252), (middle, 273), kind="accent")
        canvas.arrow((middle, 310), (middle, 331), kind="accent")
        canvas.box(left + 15, 332, 180, 34, "the same update", kind="model")
    canvas.box(25, 274, 410, 36, "all-reduce: the mean of all gradients", kind="gradient")
    return canvas
