"""The exchange after backward, and the exchange of buckets beside backward."""

from drawings.svg import Canvas

FORWARD, BACKWARD, END = 52, 102, 234  # where each begins
WIDTH = 92
LAYERS = (3, 2, 1)


def draw() -> Canvas:
    canvas = Canvas(460, 424)
    canvas.arrow((20, 36), (20, 414))
    canvas.text(20, 16, "time", kind="note")
    computing, sending = 40, 140
    canvas.text(136, 16, "overlap=False", kind="strong")
    draw_computing(canvas, computing, sending)
    canvas.box(sending, END, WIDTH, 126, "all buckets", kind="gradient")
    canvas.arrow((computing + 46, END), (computing + 46, END + 20), (sending, END + 20))
    canvas.box(computing, END + 130, WIDTH, 40, "update", kind="model")

    computing, sending = 258, 358
    canvas.text(354, 16, "overlap=True", kind="strong")
    draw_computing(canvas, computing, sending)
    for bucket, begin in enumerate((BACKWARD + 44, BACKWARD + 88, END)):
        canvas.box(sending, begin, WIDTH, 42, f"bucket {bucket + 1}", kind="gradient")
        canvas.arrow((computing + WIDTH, begin - 2), (sending, begin + 14), kind="accent")
    canvas.box(computing, END + 46, WIDTH, 40, "update", kind="model")
    canvas.line((258, END + 170), (450, END + 170), kind="accent")
    canvas.arrow((304, END + 88), (304, END + 168), both=True, kind="accent")
    canvas.text(314, END + 128, "time saved", kind="accent", anchor="start")
    return canvas


def draw_computing(canvas: Canvas, left: float, right: float) -> None:
    canvas.text(left + WIDTH / 2, 36, "computing", kind="note")
    canvas.text(right + WIDTH / 2, 36, "exchange", kind="note")
    canvas.box(left, FORWARD, WIDTH, 46, "forward", kind="model")
    for number, layer in enumerate(LAYERS):
        lines = ["backward", f"layer {layer}"]
        canvas.box(left, BACKWARD + 44 * number, WIDTH, 42, *lines, kind="model")
