"""The rows of an image on three ranks, and what one of them takes from its neighbors."""

from drawings.svg import Canvas

TOP, HEIGHT = 34, 70


def draw() -> Canvas:
    canvas = Canvas(470, 290)
    canvas.text(100, 16, "the image", kind="strong")
    canvas.text(360, 16, "what rank 1 convolves", kind="strong")
    for rank in range(3):
        canvas.box(10, TOP + HEIGHT * rank, 180, HEIGHT, f"rows of rank {rank}", kind="data")
    middle = TOP + HEIGHT
    canvas.box(270, middle - 26, 180, 26, "the last rows of rank 0", kind="gradient")
    canvas.box(270, middle, 180, HEIGHT, "rows of rank 1", kind="data")
    canvas.box(270, middle + HEIGHT, 180, 26, "the first rows of rank 2", kind="gradient")
    for y in (middle - 13, middle + HEIGHT + 13):
        canvas.arrow((190, y), (268, y), kind="accent")
    canvas.arrow((190, middle + HEIGHT / 2), (268, middle + HEIGHT / 2))
    canvas.text(
        235, 266, "kernel size // 2 rows from each side, for each convolution", kind="note"
    )
    return canvas
