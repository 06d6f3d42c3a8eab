"""The notebooks of the course run and show their output; their checks know a solution."""

from __future__ import annotations

import linecache
import shutil
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import pages
import pytest
from loading import load
from matplotlib import pyplot
from nbformat import NotebookNode
from on_ranks import lines_of, mpi

import chainermn
from chainermn.testing.modules import modules_of

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


@pytest.mark.nightly
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
    stored = notebook.metadata.chainermn.code_sha256
    assert stored == execute.digest(notebook), "nox -s notebooks stores what the code shows now"


class Ranks:
    """The ranks of this test, in the place of those that a notebook starts."""

    def __init__(self) -> None:
        self._all = self._running = chainermn.create_communicator()

    def create_communicator(self) -> chainermn.CommunicatorBase:
        return self._running

    def run(self, function: Callable[..., Any], *args: object, ranks: int) -> list[Any]:
        """Call a function on the first ranks, and return what all of them return."""
        rank = self._all.rank
        self._running = self._all.split(int(rank < ranks), rank)
        result = function(*deepcopy(args)) if rank < ranks else None
        return self._all.allgather_obj(result)[:ranks]


def run_cells(cells: list[NotebookNode], names: dict[str, Any]) -> None:
    """Run cells of code on the ranks of this test."""
    with modules_of(FOLDER):
        for cell in cells:
            lines = cell.source.splitlines(keepends=True)
            linecache.cache[cell.id] = (len(cell.source), None, lines, cell.id)  # for inspect
            exec(compile(cell.source, cell.id, "exec"), names)
            pyplot.close("all")


def check_on_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a notebook with its solution and then without, and see what its check says."""
    notebook, names = execute.read(FOLDER / f"{name}.ipynb"), {"__name__": "__main__"}
    exercise, check = (execute.tagged(notebook, tag) for tag in ("exercise", "check"))
    ranks = Ranks()
    pyplot.switch_backend("agg")
    monkeypatch.setattr(chainermn.launch, "run", ranks.run)
    monkeypatch.setattr(chainermn, "create_communicator", ranks.create_communicator)
    printed = lines_of(lambda: run_cells(code_cells(execute.solved(notebook)), names))
    shown = check.outputs[0].text.splitlines()
    assert shown and set(shown) <= set(printed)
    with pytest.raises(AssertionError):
        run_cells([exercise, check], names)


@mpi(2)
@pytest.mark.parametrize("name", ["02_five_lines", "06_model_parallel"])
def test_check_knows_the_solution_on_2_ranks(name, monkeypatch):
    """This leaves out 04, which measures, and 05, which kills ranks."""
    check_on_ranks(name, monkeypatch)


@mpi(4)
@pytest.mark.parametrize("name", ["01_ranks", "03_all_reduce"])
def test_check_knows_the_solution_on_4_ranks(name, monkeypatch):
    check_on_ranks(name, monkeypatch)


@pytest.fixture
def run_copy(tmp_path, monkeypatch) -> Callable[..., object]:
    """Return a function that runs a copy of execute.py, and returns with what it exits."""

    def run(*names: str) -> object:
        monkeypatch.setattr(sys, "argv", ["execute.py", *names])
        with pytest.raises(SystemExit) as ended:
            load(Path(shutil.copy(FOLDER / "execute.py", tmp_path))).main()
        return ended.value.code

    return run


def test_nothing_is_stored_below_an_exercise_that_somebody_has_solved(tmp_path, run_copy):
    path = Path(shutil.copy(execute.NOTEBOOKS[0], tmp_path))
    notebook = execute.read(path)
    cell = execute.tagged(notebook, "exercise")
    cell.source = cell.source.replace(execute.UNSOLVED, "")
    nbformat.write(notebook, path)
    before = path.read_bytes()
    said = f"{path.name}: its exercise has no line with '# your code' any more"
    assert str(run_copy()).startswith(said)
    assert path.read_bytes() == before


def test_name_of_no_notebook(tmp_path, run_copy, capsys):
    for path in execute.NOTEBOOKS[:2]:
        shutil.copy(path, tmp_path)
    assert run_copy("01_ranks.ipynb", "10_ranks.ipynb") == 2
    expected = "no notebook 10_ranks.ipynb; there are 01_ranks.ipynb, 02_five_lines.ipynb\n"
    assert capsys.readouterr() == ("", expected)
