"""A variable that goes to another rank and comes back, in forward and in backward."""

from drawings.svg import Canvas


def draw() -> Canvas:
    canvas = Canvas(470, 250)
    for rank in range(2):
        x = 10 + 285 * rank
        canvas.box(x, 10, 165, 230, kind="rank")
        canvas.text(x + 82, 28, f"rank {rank}", kind="strong")
    canvas.box(22, 46, 141, 30, "x", kind="data")
    canvas.box(22, 94, 141, 30, "send: delegate", kind="gradient")
    canvas.box(22, 142, 141, 30, "recv: y", kind="data")
    canvas.box(22, 190, 141, 30, "sum of y", kind="model")
    canvas.box(307, 94, 141, 30, "recv: h", kind="data")
    canvas.box(307, 142, 141, 30, "2 h", kind="model")
    for y in (76, 124, 172):
        canvas.arrow((70, y), (70, y + 18))
        canvas.arrow((115, y + 18), (115, y), kind="accent")
    canvas.arrow((355, 124), (355, 142))
    canvas.arrow((400, 142), (400, 124), kind="accent")
    canvas.arrow((163, 102), (307, 102))
    canvas.arrow((307, 116), (163, 116), kind="accent")
    canvas.arrow((307, 150), (163, 150))
    canvas.arrow((163, 164), (307, 164), kind="accent")
    canvas.text(235, 86, "forward", kind="note")
    canvas.text(235, 180, "backward", kind="accent")
    return canvas
