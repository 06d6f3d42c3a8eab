"""Three models, each on its own part of the data, and the mean of their predictions."""

from drawings.svg import Canvas


def draw() -> Canvas:
    canvas = Canvas(460, 290)
    for rank in range(3):
        x = 10 + 151 * rank
        middle = x + 69
        canvas.box(x, 10, 138, 210, kind="rank")
        canvas.text(middle, 28, f"rank {rank}", kind="strong")
        canvas.box(x + 12, 46, 114, 44, f"part {rank}", "of the data", kind="data")
        canvas.arrow((middle, 90), (middle, 111))
        canvas.box(x + 12, 112, 114, 36, f"model {rank}", kind="model")
        canvas.arrow((middle, 148), (middle, 169))
        canvas.box(x + 12, 170, 114, 36, "prediction", kind="gradient")
        canvas.arrow((middle, 206), (middle, 237), kind="accent")
    canvas.box(10, 238, 440, 42, kind="gradient")
    canvas.text(230, 250, "allgather: all predictions on every rank,")
    canvas.text(230, 268, "which takes their mean")
    return canvas
