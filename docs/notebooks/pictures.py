"""Pictures of what ranks hold and do. Each rank has its color."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

plt.rcParams.update({"figure.dpi": 80, "savefig.bbox": "tight", "font.size": 9})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})

Held: TypeAlias = Sequence[Sequence[int]]

#: Of ranks 0 to 3; they differ for color-blind eyes too (Okabe and Ito).
COLORS = ["#56b4e9", "#e69f00", "#4dbf99", "#d693b6"]


def ranks_in(total: int) -> list[int]:
    """Return which ranks are in a sum to which rank r adds 2 ** r."""
    return [rank for rank in range(len(COLORS)) if total >> rank & 1]


def draw_held(axes: Axes, held: Held, *, left: float = 0.0, before: Held | None = None) -> None:
    """Draw a row for each rank: its sums, each with the colors of the ranks that are in it.

    Parameters
    ----------
    axes : Axes
    held : sequence of (sequence of int)
        For each rank its sums. Rank r adds 2 ** r to those it takes part in.
    left : float
        Where the rows begin; a box has the width 1.
    before : like held, optional
        Sums that have changed since then get a thick frame.
    """
    for row, sums in enumerate(held):
        for column, total in enumerate(sums):
            x, parts = left + column + 0.05, ranks_in(total)
            for index, rank in enumerate(parts):
                y, height = row + 0.05 + 0.9 * index / len(parts), 0.9 / len(parts)
                axes.add_patch(Rectangle((x, y), 0.9, height, color=COLORS[rank], lw=0))
            is_new = before is not None and before[row][column] != total
            frame = {"ec": "black", "lw": 1.8} if is_new else {"ec": "0.6", "lw": 0.8}
            axes.add_patch(Rectangle((x, row + 0.05), 0.9, 0.9, fill=False, **frame))
            axes.text(x + 0.45, row + 0.5, str(total), ha="center", va="center")
    axes.axis("off")


def label_ranks(axes: Axes, ranks: int) -> None:
    """Write the names of the ranks to the left of their rows, rank 0 on top."""
    for rank in range(ranks):
        axes.text(-0.15, rank + 0.5, f"rank {rank}", ha="right", va="center")
    axes.set(xlim=(-1.4, 4), ylim=(ranks + 0.05, -0.05), aspect="equal")
