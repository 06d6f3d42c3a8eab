"""Run the notebooks of the course and store what they show: ``nox -s notebooks``.

Each ends with an exercise: a cell tagged ``exercise`` with a function to complete, a cell tagged
``check``, and a text tagged ``solution`` with the completed function. What the check says to the
solution is stored.
"""

from __future__ import annotations

import hashlib
import re
import socket
import sys
from copy import deepcopy
from pathlib import Path

import matplotlib.font_manager  # noqa: F401  - announces its first use ever, here in no notebook
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
#: Seconds after which a cell hangs, on however busy a machine.
LIMIT = 300
#: The comment in an exercise that nobody has solved.
UNSOLVED = "# your code"


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def tagged(notebook: NotebookNode, tag: str) -> NotebookNode:
    """Return the one cell with a tag."""
    (cell,) = (cell for cell in notebook.cells if tag in cell.metadata.get("tags", []))
    return cell


def solution(notebook: NotebookNode) -> str:
    """Return the code of the solution."""
    (code,) = re.findall("```python\n(.*?)```", tagged(notebook, "solution").source, re.DOTALL)
    return code


def solved(notebook: NotebookNode) -> NotebookNode:
    """Return a copy with the solution in the place of the exercise."""
    copy = deepcopy(notebook)
    tagged(copy, "exercise").source = solution(notebook)
    return copy


def digest(notebook: NotebookNode) -> str:
    """Return a digest of the code that makes the outputs, with which they are stored."""
    cells = [cell.source for cell in solved(notebook).cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(cells).encode()).hexdigest()


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run the cells of a notebook in a folder; their outputs are then in it."""
    NotebookClient(
        notebook,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],  # else it warns that it talks by TCP
        resources={"metadata": {"path": str(folder)}},
        timeout=LIMIT,
        record_timing=False,
        coalesce_streams=True,
    ).execute()


def without_this_machine(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Return outputs without notes on the number of cores here, and the name of the host."""
    for output in outputs:
        if output.output_type == "stream":
            text = re.sub(
                r"^\[rank \d+\] chainermn: note: .*\n", "", output.text, flags=re.MULTILINE
            )
            output.text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "laptop", text)
    return [output for output in outputs if output.get("text") != ""]


def store(path: Path) -> None:
    """Run a notebook, and write its outputs into it."""
    notebook = read(path)
    executed = solved(notebook)
    execute(executed, path.parent)
    for cell, ran in zip(notebook.cells, executed.cells, strict=True):
        if cell.cell_type == "code":
            cell.outputs = without_this_machine(ran.outputs)
            cell.execution_count = ran.execution_count
    notebook.metadata.chainermn = {"code_sha256": digest(notebook)}
    nbformat.write(notebook, path)


def main() -> None:
    paths = [HERE / Path(name).name for name in sys.argv[1:]] or NOTEBOOKS
    if unknown := [path.name for path in paths if path not in NOTEBOOKS]:
        names = ", ".join(path.name for path in NOTEBOOKS)
        print(f"no notebook {', '.join(unknown)}; there are {names}", file=sys.stderr)
        sys.exit(2)
    for path in paths:
        if UNSOLVED not in tagged(read(path), "exercise").source:
            sys.exit(
                f"{path.name}: its exercise has no line with '{UNSOLVED}' any more, and what is "
                "stored below it would be that of the solution; put the exercise back"
            )
    for path in paths:
        print(path.name, flush=True)
        store(path)


if __name__ == "__main__":
    main()
