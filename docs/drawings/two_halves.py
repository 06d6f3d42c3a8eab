"""A layer on each of two ranks, with what travels between them."""

from drawings.svg import Canvas


def draw() -> Canvas:
    canvas = Canvas(470, 150)
    for rank, lines in enumerate((("first layer",), ("second layer,", "loss"))):
        x = 10 + 285 * rank
        canvas.box(x, 10, 165, 130, kind="rank")
        canvas.text(x + 82, 28, f"rank {rank}", kind="strong")
        canvas.box(x + 12, 46, 141, 80, *lines, kind="model")
    canvas.arrow((163, 66), (307, 66))
    canvas.text(235, 52, "h", kind="note")
    canvas.arrow((307, 106), (163, 106), kind="accent")
    canvas.text(235, 122, "gradient of h", kind="accent")
    return canvas
