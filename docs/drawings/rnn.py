"""A recurrent network on a sequence that is divided along time."""

from drawings.svg import Canvas


def draw() -> Canvas:
    canvas = Canvas(460, 288)
    for rank in range(3):
        y = 10 + 104 * rank
        canvas.box(10, y, 440, 60, kind="rank")
        canvas.text(24, y + 30, f"rank {rank}", kind="strong", anchor="start")
        canvas.box(90, y + 12, 118, 36, f"steps {4 * rank} to {4 * rank + 3}", kind="data")
        canvas.arrow((208, y + 30), (231, y + 30))
        canvas.box(232, y + 12, 90, 36, "LSTM", kind="model")
        canvas.arrow((322, y + 30), (345, y + 30))
        canvas.box(346, y + 12, 90, 36, f"loss {rank}", kind="gradient")
    for y in (58, 162):
        canvas.arrow((257, y), (257, y + 67))
        canvas.text(248, y + 34, "h, c", kind="note", anchor="end")
        canvas.arrow((297, y + 67), (297, y), kind="accent")
        canvas.text(306, y + 34, "gradients", kind="accent", anchor="start")
    return canvas
