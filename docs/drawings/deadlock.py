"""A deadlock: two ranks make different calls, and wait for each other."""

from drawings.svg import Canvas

CALLS = ("validation:", "allgather_obj"), ("next iteration:", "multi_node_mean_grad")


def draw() -> Canvas:
    canvas = Canvas(460, 346)
    canvas.arrow((20, 40), (20, 264))
    canvas.text(20, 18, "time", kind="note")
    for rank, call in enumerate(CALLS):
        left = 44 + 208 * rank
        canvas.text(left + 99, 18, f"rank {rank}", kind="strong")
        canvas.box(left, 40, 198, 36, "forward, backward", kind="model")
        canvas.box(left, 130, 198, 50, *call, kind="gradient")
        canvas.box(left, 190, 198, 74, f"waits for rank {1 - rank}")
    canvas.box(44, 86, 406, 34, "exchange of gradients, on both", kind="gradient")
    canvas.box(
        10,
        286,
        440,
        50,
        "after two seconds the job ends: the message",
        "shows both calls, with their lines",
        kind="fail",
    )
    return canvas
