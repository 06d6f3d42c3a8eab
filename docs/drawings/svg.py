"""Boxes, arrows and text as an SVG file that follows the theme of the page around it."""

from __future__ import annotations

from html import escape

LINE = 17  # height of a line of text
SIZES = {"note": 13, "small": 12}  # of text, in pixels; all other text has 14

_LIGHT = {
    "page": "#ffffff",
    "ink": "#1a1c1e",
    "pale": "#5a5c63",
    "accent": "#0a4bff",
    "bad": "#b3261e",
    "line": "#6b6f76",
    "group": "#f5f6f8",
    "group-line": "#c9ccd2",
    "data": "#e2f2e4",
    "data-line": "#3c8a4a",
    "model": "#e2ebfc",
    "model-line": "#4a73c4",
    "gradient": "#fdeccd",
    "gradient-line": "#b0720f",
    "fail": "#fbdedb",
    "fail-line": "#b3261e",
}
_DARK = {
    "page": "#131416",
    "ink": "#e3e4e4",
    "pale": "#a6aaaf",
    "accent": "#6cb0ff",
    "bad": "#ff8a80",
    "line": "#8f949b",
    "group": "#1e2124",
    "group-line": "#44494e",
    "data": "#173620",
    "data-line": "#62b877",
    "model": "#182d55",
    "model-line": "#7ba3ee",
    "gradient": "#40300f",
    "gradient-line": "#e0a63a",
    "fail": "#4a1d1a",
    "fail-line": "#ff8a80",
}
_STROKES = ("line", "accent", "bad")
# What a box stands for, which is its color.
_BOXES = {
    "rank": "group",
    "host": "group",
    **{k: k for k in ("data", "model", "gradient", "fail")},
}


class Canvas:
    """Collects what is drawn.

    Parameters
    ----------
    width, height : int
        Size in pixels on a wide screen. Up to 470, a phone shows all text with 9 pixels or more.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = ""):
        """Draw a box with lines of text in its middle."""
        self._parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>'
        )
        top = y + height / 2 - LINE * (len(lines) - 1) / 2
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + LINE * number, line)

    def text(self, x: float, y: float, line: str, *, kind: str = "", anchor: str = "middle"):
        """Write a line around the height ``y``."""
        self._parts.append(
            f'<text class="{kind}" x="{x}" y="{y}" font-size="{SIZES.get(kind, 14)}" '
            f'text-anchor="{anchor}" dominant-baseline="central">{escape(line)}</text>'
        )

    def arrow(self, *points: tuple[float, float], both: bool = False, kind: str = "line"):
        """Draw a line through the points, with a head at its end, or at both."""
        start = f'marker-start="url(#{kind})" ' if both else ""
        self._polyline(points, kind, f'{start}marker-end="url(#{kind})"')

    def line(self, *points: tuple[float, float], kind: str = "line"):
        """Draw a line without heads."""
        self._polyline(points, kind)

    def _polyline(self, points, kind: str, heads: str = ""):
        path = " ".join(f"{x},{y}" for x, y in points)
        self._parts.append(f'<polyline class="{kind}" points="{path}" {heads}/>')

    def svg(self, title: str) -> str:
        """Return the drawing; ``title`` is for those who do not see it."""
        heads = (
            f'<marker id="{kind}" class="{kind}" viewBox="0 0 10 10" refX="9" refY="5" '
            'markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
            '<path d="M0 0 10 5 0 10z"/></marker>'
            for kind in _STROKES
        )
        parts = "\n".join([f"<defs>{''.join(heads)}</defs>", *self._parts])
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">\n'
            f"<title>{escape(title)}</title>\n<style>\n{_style()}\n</style>\n"
            # A page in colors that the drawing has not noticed does not hide it.
            f'<rect class="page" width="100%" height="100%"/>\n{parts}\n</svg>\n'
        )


def _style() -> str:
    rules = [
        f"svg {{ {_variables(_LIGHT)} }}",
        f"@media (prefers-color-scheme: dark) {{ svg {{ {_variables(_DARK)} }} }}",
        'text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }',
        "text { fill: var(--ink); }",
        ".strong { font-weight: bold; }",
        "text.note { fill: var(--pale); }",
        "text.accent { fill: var(--accent); }",
        "text.bad { fill: var(--bad); font-weight: bold; }",
        "rect { fill: var(--page); stroke: var(--line); }",
        "rect.page { stroke: none; }",
        *(
            f"rect.{kind} {{ fill: var(--{color}); stroke: var(--{color}-line); }}"
            for kind, color in _BOXES.items()
        ),
        "polyline { fill: none; stroke-width: 1.5; }",
        *(f"polyline.{kind} {{ stroke: var(--{kind}); }}" for kind in _STROKES),
        *(f"marker.{kind} {{ fill: var(--{kind}); }}" for kind in _STROKES),
    ]
    return "\n".join(rules)


def _variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())
