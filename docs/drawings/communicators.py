"""How gradients of two hosts with two ranks each meet, in three ways."""

from drawings.svg import Canvas

WAYS = (
    ("one all-reduce", "of all ranks"),
    ("hierarchical", "in each host, between leaders, in each host"),
    ("two_dimensional", "halves: in each host, between hosts, in each host"),
)


def draw() -> Canvas:
    canvas = Canvas(470, 420)
    for row, (name, how) in enumerate(WAYS):
        y = 10 + 138 * row
        canvas.text(10, y + 8, name, kind="strong", anchor="start")
        canvas.text(10, y + 28, how, kind="note", anchor="start")
        for host in (0, 1):
            left = 60 + 220 * host
            canvas.box(left - 20, y + 42, 170, 62, kind="rank")
            for slot in (0, 1):
                canvas.box(left + 90 * slot, y + 56, 34, 34, str(2 * host + slot), kind="model")
        middle = y + 73
        if row == 0:
            for x in (94, 184, 314):
                end = {94: 150, 184: 280, 314: 370}[x]
                canvas.arrow((x + 2, middle), (end - 2, middle), both=True, kind="accent")
            continue
        for left in (60, 280):
            canvas.arrow((left + 36, middle), (left + 88, middle), both=True, kind="accent")
        canvas.arrow(
            (77, y + 92), (77, y + 120), (297, y + 120), (297, y + 92), both=True, kind="accent"
        )
        if row == 2:
            canvas.arrow(
                (167, y + 92),
                (167, y + 112),
                (387, y + 112),
                (387, y + 92),
                both=True,
                kind="accent",
            )
    return canvas
