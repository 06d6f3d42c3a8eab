"""Three models, each on its own part of the data, and the mean of their predictions."""

from drawings.svg import Canvas


def draw(description: str) -> str:
    canvas = Canvas("ensemble", 580, 230)
    for rank in range(3):
        x = 10 + 195 * rank
        canvas.box(x, 10, 170, 160, kind="rank")
        canvas.text(x + 85, 28, f"rank {rank}", kind="strong")
        canvas.box(x + 15, 46, 140, 30, f"part {rank} of the data", kind="data")
        canvas.arrow((x + 85, 76), (x + 85, 90))
        canvas.box(x + 15, 90, 140, 30, f"model {rank}", kind="model")
        canvas.arrow((x + 85, 120), (x + 85, 190), kind="accent")
    canvas.text(102, 150, "prediction", kind="accent", anchor="start")
    canvas.box(
        10,
        190,
        560,
        30,
        "allgather: all predictions on every rank, and their mean",
        kind="gradient",
    )
    return canvas.svg(description)
