"""Layers on two ranks, and a second replica of that: who sends what to whom."""

from drawings.svg import Canvas

LEFT, RIGHT, WIDTH = 10, 295, 165  # of the boxes of ranks
TOPS, HEIGHT = (32, 312), 204
EXAMPLES = "30 examples", "30 others"
NOTES = "train_model_parallel.py: only this", "train_dual_parallel.py: any number"


def draw() -> Canvas:
    canvas = Canvas(470, 548)
    draw_replica(canvas, 0, y_of_title=TOPS[0] - 16)
    draw_replica(canvas, 1, y_of_title=TOPS[1] + HEIGHT + 16)
    begin, end = TOPS[0] + HEIGHT + 2, TOPS[1] - 2
    y = (begin + end) / 2
    for x, offset, anchor, part in (
        (LEFT, 10, "start", "layers 1 and 3"),
        (RIGHT, -10, "end", "layer 2"),
    ):
        x += WIDTH / 2
        canvas.arrow((x, begin), (x, end), both=True, kind="accent")
        canvas.text(x + offset, y - 9, "mean gradients", kind="accent", anchor=anchor)
        canvas.text(x + offset, y + 9, f"of {part}", kind="accent", anchor=anchor)
    return canvas


def draw_replica(canvas: Canvas, replica: int, y_of_title: float) -> None:
    top = TOPS[replica]
    canvas.text(LEFT, y_of_title, f"replica {replica}", kind="strong", anchor="start")
    canvas.text(RIGHT + WIDTH, y_of_title, NOTES[replica], kind="note", anchor="end")
    for x, rank in ((LEFT, 2 * replica), (RIGHT, 2 * replica + 1)):
        canvas.box(x, top, WIDTH, HEIGHT, kind="rank")
        canvas.text(x + WIDTH / 2, top + 16, f"rank {rank}", kind="strong")
    canvas.box(LEFT + 12, top + 30, WIDTH - 24, 30, EXAMPLES[replica], kind="data")
    canvas.arrow((LEFT + WIDTH / 2, top + 60), (LEFT + WIDTH / 2, top + 82))
    canvas.box(LEFT + 12, top + 84, WIDTH - 24, 44, "layer 1", kind="model")
    canvas.box(LEFT + 12, top + 148, WIDTH - 24, 44, "layer 3, loss", kind="model")
    canvas.box(RIGHT + 12, top + 84, WIDTH - 24, 108, "layer 2", kind="model")

    begin, end = LEFT + WIDTH - 10, RIGHT + 10
    middle = (begin + end) / 2
    for y, (source, destination) in ((top + 98, (begin, end)), (top + 162, (end, begin))):
        canvas.text(middle, y - 11, "activations", kind="note")
        canvas.arrow((source, y), (destination, y))
        canvas.arrow((destination, y + 16), (source, y + 16), kind="accent")
        canvas.text(middle, y + 27, "gradients", kind="accent")
