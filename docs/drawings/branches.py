"""A model that branches to two ranks and joins on the first."""

from drawings.svg import Canvas


def draw(description: str) -> str:
    canvas = Canvas("branches", 470, 250)
    canvas.box(10, 10, 210, 230, kind="rank")
    canvas.text(115, 28, "rank 0", kind="strong")
    canvas.box(25, 50, 140, 40, "first", kind="model")
    canvas.box(25, 180, 140, 40, "join, loss", kind="model")
    for rank in (1, 2):
        top = 10 + 120 * (rank - 1)
        canvas.box(290, top, 170, 110, kind="rank")
        canvas.text(375, top + 18, f"rank {rank}", kind="strong")
        canvas.box(305, top + 40, 140, 40, f"branch {rank}", kind="model")
    canvas.arrow((165, 62), (305, 62), kind="accent")
    canvas.arrow((165, 78), (195, 78), (195, 182), (305, 182), kind="accent")
    canvas.arrow((375, 90), (375, 105), (250, 105), (250, 192), (165, 192), kind="accent")
    canvas.arrow((375, 210), (375, 225), (250, 225), (250, 208), (165, 208), kind="accent")
    return canvas.svg(description)
