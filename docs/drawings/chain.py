"""Model parallelism: the layers of one model on three ranks."""

from drawings.svg import Canvas


def draw() -> Canvas:
    canvas = Canvas(460, 380)
    canvas.box(130, 10, 140, 32, "a batch", kind="data")
    canvas.arrow((175, 42), (175, 61))
    for rank in range(3):
        y = 62 + 96 * rank
        layers = f"layers {2 * rank + 1} and {2 * rank + 2}"
        canvas.box(10, y, 440, 52, kind="rank")
        canvas.text(24, y + 26, f"rank {rank}", kind="strong", anchor="start")
        canvas.box(130, y + 9, 140, 34, layers, kind="model")
    for y in (105, 201):
        canvas.arrow((175, y), (175, y + 61))
        canvas.text(165, y + 31, "activations", kind="note", anchor="end")
        canvas.arrow((225, y + 61), (225, y), kind="accent")
        canvas.text(235, y + 31, "gradients", kind="accent", anchor="start")
    canvas.arrow((175, 297), (175, 337))
    canvas.arrow((225, 337), (225, 297), kind="accent")
    canvas.box(130, 338, 140, 32, "loss", kind="gradient")
    return canvas
