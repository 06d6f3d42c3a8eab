"""Drawings as files of their own, for READMEs; ``python -m drawings.standalone`` writes them."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: What each file shows, and a description for those who do not see it.
FILES = {
    "apps/mnist/pictures/model_parallelism.svg": (
        "model_parallelism",
        "Rank 0 sends the activations of layer 1 to rank 1, which sends those of layer 2 back; "
        "gradients go the other way. Ranks 2 and 3 do the same with other examples. Ranks 0 and "
        "2, and ranks 1 and 3, average their gradients.",
    )
}

# Of the theme where it is light: a file does not learn whether the page around it is dark.
COLOURS = {
    "background-primary": "#ffffff",
    "background-secondary": "#f8f9fb",
    "background-border": "#d6d8dd",
    "foreground-primary": "#1a1c1e",
    "foreground-secondary": "#5a5c63",
    "foreground-muted": "#6b6f76",
    "brand-primary": "#0a4bff",
}


def draw(path: str) -> str:
    """Return a drawing with size, colours and background of its own."""
    name, description = FILES[path]
    svg = import_module(f"drawings.{name}").draw(description)
    svg = re.sub(
        r'0 0 (\d+) (\d+)" style="[^"]*"', r'0 0 \1 \2" width="\1" height="\2"', svg, count=1
    )
    background = '<rect style="stroke: none" width="100%" height="100%"/>'
    return svg.replace("<defs>", f"<style>\n{style()}</style>{background}<defs>", 1) + "\n"


def style() -> str:
    """Return the rules that the site has for drawings, with the colours themselves."""
    sheet = (ROOT / "docs/_static/site.css").read_text(encoding="utf-8")
    rules = re.findall(r"^\.drawing (?:rect|text|polyline|marker)[^}]*}\n", sheet, re.MULTILINE)
    text = "".join(["text {\n  font-family: sans-serif;\n}\n", *rules]).replace(".drawing ", "")
    return re.sub(r"var\(--color-([\w-]+)\)", lambda found: COLOURS[found[1]], text)


if __name__ == "__main__":
    for path in FILES:
        (ROOT / path).write_text(draw(path), encoding="utf-8")
