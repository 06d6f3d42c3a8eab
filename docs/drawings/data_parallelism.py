"""Several ranks, each with the whole model and a part of the data."""

from drawings.svg import Canvas


def draw(description: str) -> str:
    canvas = Canvas("data-parallelism", 470, 300)
    canvas.box(10, 10, 450, 40, "the data set: 1437 examples", kind="data")
    for rank, part in enumerate(("0 to 718", "718 to 1436")):
        x = 10 + 240 * rank
        canvas.arrow((x + 105, 50), (x + 105, 88))
        canvas.box(x, 90, 210, 200, kind="rank")
        canvas.text(x + 105, 108, f"rank {rank}", kind="strong")
        canvas.box(x + 15, 124, 180, 34, f"examples {part}", kind="data")
        canvas.arrow((x + 105, 158), (x + 105, 180))
        canvas.box(x + 15, 182, 180, 34, "the whole model", kind="model")
        canvas.arrow((x + 105, 216), (x + 105, 238))
        canvas.box(x + 15, 240, 180, 34, "gradients", kind="gradient")
    canvas.arrow((206, 257), (264, 257), both=True, kind="accent")
    canvas.text(235, 237, "mean", kind="accent")
    return canvas.svg(description)
