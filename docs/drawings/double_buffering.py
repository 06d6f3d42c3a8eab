"""Double buffering: the gradients of one iteration travel while the next one computes."""

from drawings.svg import Canvas

LEFT, RIGHT, WIDTH = 40, 270, 180


def draw() -> Canvas:
    canvas = Canvas(460, 386)
    canvas.arrow((20, 40), (20, 376))
    canvas.text(20, 18, "time", kind="note")
    canvas.text(LEFT + WIDTH / 2, 18, "computing", kind="note")
    canvas.text(RIGHT + WIDTH / 2, 18, "exchange", kind="note")
    for iteration, top in ((1, 40), (2, 116), (3, 248)):
        lines = f"iteration {iteration}:", "forward, backward"
        canvas.box(LEFT, top, WIDTH, 66, *lines, kind="model")
    for iteration, begin, update in ((1, 116, 192), (2, 192, 324)):
        canvas.arrow((LEFT + WIDTH, begin - 14), (RIGHT - 2, begin + 10), kind="accent")
        lines = "mean of the", f"gradients of {iteration}"
        canvas.box(RIGHT, begin, WIDTH, 60, *lines, kind="gradient")
        canvas.arrow((RIGHT, begin + 50), (LEFT + WIDTH + 2, update + 22), kind="accent")
        lines = "update with the", f"gradients of {iteration}"
        canvas.box(LEFT, update, WIDTH, 46, *lines, kind="model")
    return canvas
