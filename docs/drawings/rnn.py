"""A recurrent network on a sequence that is divided along time."""

from drawings.svg import Canvas


def draw(description: str) -> str:
    canvas = Canvas("rnn", 670, 210)
    for rank in range(3):
        x = 10 + 240 * rank
        canvas.box(x, 10, 170, 190, kind="rank")
        canvas.text(x + 85, 28, f"rank {rank}", kind="strong")
        canvas.box(x + 15, 46, 140, 34, f"loss {rank}", kind="model")
        canvas.box(x + 15, 104, 140, 34, "LSTM", kind="model")
        canvas.box(x + 15, 154, 140, 34, f"steps {4 * rank} to {4 * rank + 3}", kind="data")
        canvas.arrow((x + 85, 154), (x + 85, 138))
        canvas.arrow((x + 85, 104), (x + 85, 80))
    for x in (165, 405):
        canvas.arrow((x, 114), (x + 100, 114))
        canvas.text(x + 50, 100, "h, c", kind="note")
        canvas.arrow((x + 100, 128), (x, 128), kind="accent")
        canvas.text(x + 50, 144, "gradients", kind="accent")
    return canvas.svg(description)
