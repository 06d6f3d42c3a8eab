"""Boxes, arrows and words as SVG, to be put into a page of HTML."""

from __future__ import annotations

from html import escape

LINE = 17  # height of a line of text


class Canvas:
    """Collects what is drawn.

    Parameters
    ----------
    name : str
        Of the drawing, unique on a page.
    width, height : int
        In pixels, on a wide screen.
    """

    def __init__(self, name: str, width: int, height: int) -> None:
        self.name, self.width, self.height = name, width, height
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = ""):
        """Draw a box with lines of text in its middle; returns its edges."""
        self._parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>'
        )
        top = y + height / 2 - LINE * (len(lines) - 1) / 2
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + LINE * number, line)

    def text(self, x: float, y: float, line: str, *, kind: str = "", anchor: str = "middle"):
        """Write a line around the height ``y``."""
        self._parts.append(
            f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}" '
            f'dominant-baseline="central">{escape(line)}</text>'
        )

    def arrow(self, *points: tuple[float, float], both: bool = False, kind: str = ""):
        """Draw a line through the points, with a head at its end, or at both."""
        path = " ".join(f"{x},{y}" for x, y in points)
        head = f"url(#{self.name}-head)"
        start = f'marker-start="{head}"' if both else ""
        self._parts.append(
            f'<polyline class="{kind}" points="{path}" {start} marker-end="{head}"/>'
        )

    def line(self, *points: tuple[float, float], kind: str = ""):
        """Draw a line without heads."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self._parts.append(f'<polyline class="{kind}" points="{path}"/>')

    def svg(self, description: str) -> str:
        """Return the drawing; ``description`` is for those who do not see it."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'style="max-width: {self.width}px" role="img" '
            f'aria-label="{escape(description, quote=True)}">'
            f'<defs><marker id="{self.name}-head" viewBox="0 0 10 10" refX="9" refY="5" '
            'markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
            '<path d="M0 0 10 5 0 10z"/></marker></defs>'
            f"{''.join(self._parts)}</svg>"
        )
