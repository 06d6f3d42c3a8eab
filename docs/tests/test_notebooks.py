"""The notebooks of the course run and show their output; their checks know a solution."""

from __future__ import annotations

import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import nbformat
import pages
import pytest
from loading import load
from nbformat import NotebookNode

FOLDER = pages.DOCS / "notebooks"
execute = load(FOLDER / "execute.py")
MOST_BYTES = 200_000


@pytest.fixture(params=execute.NOTEBOOKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: NotebookNode) -> list[str]:
    """Return the kinds of output that a cell has, except notes on the machine."""
    outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return [" ".join(sorted(output.get("data", [output.output_type]))) for output in outputs]


def test_notebook_runs_and_its_check_knows_the_solution(path, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # not the user's settings
    shutil.copy(FOLDER / "pictures.py", tmp_path)
    stored = execute.read(path)
    ran = execute.solved(stored)
    n_cells = len(ran.cells)
    # Once more, like a reader who has not solved the exercise.
    again = deepcopy([execute.tagged(stored, "exercise"), execute.tagged(stored, "check")])
    again[1].metadata.tags.append("raises-exception")
    for cell in again:
        cell.id += "-again"
    ran.cells += again

    execute.execute(ran, tmp_path)

    errors = [output.get("ename") for output in ran.cells[-1].outputs]
    assert "AssertionError" in errors, "the check accepts what nobody has solved"
    del ran.cells[n_cells:]
    for cell, shown in zip(code_cells(ran), code_cells(stored), strict=True):
        assert kinds(cell) == kinds(shown), f"{shown.id}: nox -s notebooks stores what it shows"


def test_stored_notebook(path):
    notebook = execute.read(path)
    cells = code_cells(notebook)
    assert path.stat().st_size < MOST_BYTES
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs)
    texts = "".join(output.get("text", "") for output in outputs)
    assert "Warning" not in texts
    assert execute.UNSOLVED in execute.tagged(notebook, "exercise").source


def run_copy(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of execute.py with the notebooks beside it."""
    shutil.copy(FOLDER / "execute.py", folder)
    command = [sys.executable, folder / "execute.py", *names]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_nothing_is_stored_below_an_exercise_that_somebody_has_solved(tmp_path):
    path = Path(shutil.copy(execute.NOTEBOOKS[0], tmp_path))
    notebook = execute.read(path)
    cell = execute.tagged(notebook, "exercise")
    cell.source = cell.source.replace(execute.UNSOLVED, "")
    nbformat.write(notebook, path)
    before = path.read_bytes()
    done = run_copy(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{path.name}: its exercise has no line with '# your code' any more")
    assert path.read_bytes() == before


def test_name_of_no_notebook(tmp_path):
    for path in execute.NOTEBOOKS[:2]:
        shutil.copy(path, tmp_path)
    done = run_copy(tmp_path, "01_ranks.ipynb", "10_ranks.ipynb")
    expected = "no notebook 10_ranks.ipynb; there are 01_ranks.ipynb, 02_five_lines.ipynb\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
