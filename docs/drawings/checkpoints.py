"""Checkpoints: a file from each rank, and what is read after a rank is killed."""

from drawings.svg import Canvas


def draw() -> Canvas:
    canvas = Canvas(460, 404)
    for rank in range(3):
        x = left_of(rank)
        canvas.text(x + 56, 18, f"rank {rank}", kind="strong")
        canvas.box(x, 38, 112, 34, f"job.{rank}.100", kind="data")
        canvas.arrow((x + 56, 72), (x + 56, 95))
        if rank == 1:
            canvas.box(x, 96, 112, 34, "is killed", kind="fail")
        else:
            canvas.box(x, 96, 112, 34, f"job.{rank}.200")
        canvas.arrow((x + 56, 204), (x + 56, 227), kind="accent")
        canvas.box(x, 228, 112, 34, f"job.{rank}.100", kind="data")
    canvas.text(10, 46, "iteration", kind="note", anchor="start")
    canvas.text(10, 64, "100", anchor="start")
    canvas.text(10, 104, "iteration", kind="note", anchor="start")
    canvas.text(10, 122, "200", anchor="start")
    lines = "After a restart: the newest checkpoint", "that is complete on all ranks is 100"
    canvas.box(10, 154, 440, 50, *lines)
    canvas.text(10, 236, "3 ranks", kind="strong", anchor="start")
    canvas.text(10, 254, "read", kind="note", anchor="start")
    canvas.text(10, 308, "2 ranks", kind="strong", anchor="start")
    canvas.text(10, 326, "read", kind="note", anchor="start")
    for rank in range(2):
        canvas.box(left_of(rank), 300, 112, 34, "job.0.100", kind="data")
    canvas.text(
        84, 354, "Another number of ranks: only if the ranks are", kind="note", anchor="start"
    )
    canvas.text(84, 374, "replicas. All read the file of rank 0.", kind="note", anchor="start")
    return canvas


def left_of(rank: int) -> int:
    return 84 + 127 * rank
