"""Three ranks in a row, with the whole batch at a time and with four micro-batches."""

from drawings.svg import Canvas

RANKS, LEFT, UNIT, ROW = 3, 66, 16, 34


def draw() -> Canvas:
    canvas = Canvas(460, 346)
    canvas.text(10, 16, "the whole batch at a time", kind="strong", anchor="start")
    draw_schedule(canvas, 34, micro_batches=1, length=4)
    canvas.text(10, 168, "four micro-batches", kind="strong", anchor="start")
    draw_schedule(canvas, 186, micro_batches=4, length=1)
    canvas.arrow((LEFT, 302), (450, 302))
    canvas.text(10, 302, "time", kind="note", anchor="start")
    for x, kind, name in ((LEFT, "model", "forward"), (190, "gradient", "backward")):
        canvas.box(x, 320, 16, 16, kind=kind)
        canvas.text(x + 24, 328, name, kind="note", anchor="start")
    return canvas


def draw_schedule(canvas: Canvas, top: int, *, micro_batches: int, length: int) -> None:
    forward = micro_batches + RANKS - 1
    for rank in range(RANKS):
        y = top + ROW * rank
        canvas.text(10, y + 15, f"rank {rank}", anchor="start")
        for number in range(micro_batches):
            begins = rank + number, forward + RANKS - 1 - rank + number
            names = number + 1, micro_batches - number  # backward goes from the last to the first
            for begin, name, kind in zip(begins, names, ("model", "gradient"), strict=True):
                x = LEFT + UNIT * length * begin
                lines = [str(name)] if micro_batches > 1 else []
                canvas.box(x, y, UNIT * length - 2, 30, *lines, kind=kind)
