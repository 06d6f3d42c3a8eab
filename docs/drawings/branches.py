"""A model that branches to two ranks and joins on the first."""

from drawings.svg import Canvas


def draw() -> Canvas:
    canvas = Canvas(470, 262)
    canvas.box(10, 10, 450, 86, kind="rank")
    canvas.text(235, 28, "rank 0", kind="strong")
    canvas.box(25, 42, 140, 40, "first", kind="model")
    canvas.box(305, 42, 140, 40, "join, loss", kind="model")
    for rank in (1, 2):
        top = 38 + 74 * rank
        canvas.box(150, top, 170, 66, kind="rank")
        canvas.text(235, top + 13, f"rank {rank}", kind="strong")
        canvas.box(165, top + 24, 140, 34, f"branch {rank}", kind="model")
        y, away = top + 41, 40 * rank
        canvas.arrow((140 - away, 82), (140 - away, y), (165, y))
        canvas.arrow((305, y), (330 + away, y), (330 + away, 82))
    return canvas
