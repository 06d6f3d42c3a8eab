"""The drawings of the documentation, one module each.

Each becomes a file, ``docs/_static/NAME.svg``, which Markdown shows as an image, on the site as on
GitHub. A drawing follows the theme of the page: browsers tell an image whether it is to be light
or dark, by ``color-scheme`` of the page (``site.css``, and GitHub's own).
"""

from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Applications work wherever they are copied, so they have copies of their own.
COPIES = {"model_parallelism": ROOT / "apps/mnist/pictures/model_parallelism.svg"}


def files() -> dict[Path, str]:
    """Return what belongs into each file."""
    found = {}
    for module in sorted(Path(__file__).parent.glob("[!_]*.py")):
        name = module.stem
        if name in ("svg", "screenshot"):
            continue
        drawing = import_module(f"drawings.{name}")
        svg = drawing.draw().svg(drawing.__doc__)
        found[ROOT / f"docs/_static/{name}.svg"] = svg
        if name in COPIES:
            found[COPIES[name]] = svg
    return found
