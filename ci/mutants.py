"""Break the library in small ways, one at a time, and see whether a test notices.

``nox -s mutants`` runs ``python ci/mutants.py RESULTS``. In each mutant, cosmic-ray has changed
one operator, number, condition, loop or exception. The choice of mutants depends only on their
text and the function around it, so that two commits meet the same ones, even if files have moved.
RESULTS gets one line of JSON per mutant; mutants already in it are not tried again.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.work_item import MutationSpec
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("libs/chainermn/src/chainermn")
TESTS = Path("libs/chainermn/tests")
#: Beginning of a module's name, and the tests that should notice; the first match counts.
#: Mutants of other modules are noticed by the tests of their folder or file.
NOTICED_BY = {
    "agreement": ["test_agreement.py", "communicators"],
    "arguments": ["test_arguments.py", "compression"],
    "communicators/": ["communicators", "without_gpu/test_communicators.py"],
    "compression/": ["compression", "optimizers/test_compression.py"],
    "dataset.": ["test_original_names.py"],
    "extensions/checkpoint": [
        "extensions/test_checkpoint.py",
        "extensions/test_checkpoint_of_other_ranks.py",
    ],
    "extensions/distributed_report": ["profiling"],
    "extensions/timeline": ["profiling"],
    "failures/watch": ["failures", "launch"],
    "gradients/batched_copy": ["without_gpu"],
    "gradients/overlap": ["optimizers/test_overlap.py", "without_gpu"],
    "gradients/": [
        *("gradients", "communicators/test_models.py", "optimizers", "without_gpu"),
        "gpu/test_compression.py",
    ],
    "multi_node_": ["test_original_names.py"],
    "nccl": ["test_nccl.py", "without_gpu/test_nccl.py"],
    "notes": ["launch", "testing"],
    "process/helper": ["failures"],
    "process/": ["process", "communicators/test_create_communicator.py"],
    "profiling/": ["profiling", "communicators/test_extensions_at_work.py"],
    "resuming": ["extensions"],
    "spans": ["profiling"],
    "transport/duplicates": ["optimizers/test_overlap.py"],
    "transport/gpu": ["without_gpu", "gpu/test_compression.py"],
    "transport/": ["transport", "communicators"],
}
#: What tells which release this is, and the commands' names: nothing to break.
NOT_BROKEN = ("__init__.py", "__main__.py", "version.py")
# Tests that take a long time and would notice little more, and two that set PYTHONPATH, where the
# mutants are.
LEFT_OUT = "not in_vain and not test_freed_memory and not (told_once and (level or computes))"
SECONDS = 600
# Most of these change nothing visible.
NOT_TRIED = ("core/RemoveDecorator", "core/NoOp")


@dataclass(frozen=True)
class Mutant:
    """One change of one place in one module."""

    key: str
    module: str
    definition: str
    operator: str
    occurrence: int
    start: tuple[int, int]
    end: tuple[int, int]


def all_mutants(module: str, seen: Counter[str]) -> Iterator[Mutant]:
    """Yield all mutants of a module, except in annotations, which are never evaluated.

    ``seen`` counts the mutants of all modules that look alike.
    """
    path = ROOT / SOURCE / module
    text = path.read_text(encoding="utf-8")
    lines, spans = text.splitlines(), list(never_evaluated(text))
    nodes = list(ast_nodes(get_ast_from_path(path)))
    for operator in operator_names():
        if operator in NOT_TRIED or get_operator(operator).arguments():
            continue
        occurrence = -1
        for node in nodes:
            for start, end in get_operator(operator)().mutation_positions(node):
                occurrence += 1
                if any(first <= start < last for first, last in spans):
                    continue
                definition = str(ASTQuery(node).get_definition_name())
                name = f"{definition} {operator} {lines[start[0] - 1].strip()}"
                seen[name] += 1
                key = hashlib.sha256(f"{name} {seen[name]}".encode()).hexdigest()
                yield Mutant(key, module, definition, operator, occurrence, start, end)


def never_evaluated(text: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the beginning and end of annotations and of code that only type checkers read."""
    for node in ast.walk(ast.parse(text)):
        found: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        if isinstance(node, ast.FunctionDef):
            found.append(node.returns)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found.append(node)
        for part in found:
            if isinstance(part, ast.expr | ast.stmt):
                end = (part.end_lineno or 0, part.end_col_offset or 0)
                yield (part.lineno, part.col_offset), end


def choose(number: int) -> list[Mutant]:
    """Return one mutant for each of ``number`` places: those with the smallest hashes.

    Leaves out what cosmic-ray cannot break: it takes the asterisk among parameters for a product,
    and knows exceptions only by plain names.
    """
    of_place: dict[tuple[str, tuple[int, int]], Mutant] = {}
    seen = Counter[str]()
    for path in sorted((ROOT / SOURCE).rglob("*.py")):
        module = path.relative_to(ROOT / SOURCE).as_posix()
        if module not in NOT_BROKEN:
            for mutant in all_mutants(module, seen):
                place = (module, mutant.start)
                of_place[place] = min(of_place.get(place, mutant), mutant, key=lambda m: m.key)
    in_order = sorted(of_place.values(), key=lambda mutant: mutant.key)
    return list(islice(filter(can_be_made, in_order), number))


def can_be_made(mutant: Mutant) -> bool:
    text = (ROOT / SOURCE / mutant.module).read_text(encoding="utf-8")
    operator = get_operator(mutant.operator)()
    try:
        ast.parse(mutate_code(text, operator, mutant.occurrence) or "")
    except (SyntaxError, AttributeError):
        return False
    return True


def tests_of(module: str) -> list[str]:
    """Return the files and folders of tests that should notice mutants of a module."""
    for start, tests in NOTICED_BY.items():
        if module.startswith(start):
            return tests
    own = [room_of(module) if "/" in module else f"test_{module}"]
    if not (ROOT / TESTS / own[0]).exists():
        raise click.ClickException(f"no tests are known to notice mutants of {module}")
    return own


def room_of(module: str) -> str:
    """Return the folder of a module, or its name without one."""
    return module.split("/")[0].removesuffix(".py")


def copy_repository(folder: str) -> None:
    """Give this process its own copy of the repository to change and test."""
    copy = Path(tempfile.mkdtemp(dir=folder)) / "copy"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "_build", "result")
    shutil.copytree(ROOT, copy, ignore=ignored)
    # As in a wheel: directly on the path, it would also hide Chainer's copy.
    as_installed = copy / "as_installed"
    as_installed.mkdir()
    (as_installed / "_chainermn_dist").symlink_to(copy / SOURCE.parent)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (as_installed, copy / "ci")))


def pytest(tests: Iterable[str]) -> list[str]:
    """Return the command that runs these tests."""
    options = ["-x", "-q", "--no-header", "--tb=line", "-k", LEFT_OUT]
    options += ["-m", "not gpu and not nightly and not venv"]
    options += ["-p", "no:cacheprovider", "-p", "three_ranks_first"]
    paths = [str(TESTS / test) for test in tests]
    return [sys.executable, "-m", "pytest", *options, *paths]


def failure_of(tests: tuple[str, ...]) -> str:
    """Return what these tests print if they fail without any mutant."""
    done = subprocess.run(pytest(tests), check=False, capture_output=True, text=True)
    return f"exit code {done.returncode}\n{done.stdout}{done.stderr}" if done.returncode else ""


def try_out(mutant: Mutant) -> dict[str, Any]:
    """Make the mutant and run the tests; return the outcome."""
    spec = MutationSpec(
        Path.cwd() / SOURCE / mutant.module,
        mutant.operator,
        mutant.occurrence,
        mutant.start,
        mutant.end,
    )
    command = shlex.join(pytest(tests_of(mutant.module)))
    result = mutate_and_test([spec], command, SECONDS)
    outcome = result.test_outcome.value if result.test_outcome else result.worker_outcome.value
    last = (result.output or "").strip().splitlines()[-3:]
    return {**asdict(mutant), "outcome": outcome, "diff": result.diff, "last lines": last}


@click.command()
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--number", default=300, help="of mutants")
@click.option("--workers", default=3, help="number of mutants tried at a time")
@click.option("--again", type=click.Path(exists=True, path_type=Path), help="survivors of these")
def main(results: Path, number: int, workers: int, again: Path | None) -> None:
    """Try mutants and print those that survive."""
    chosen = choose(number)
    if again is not None:
        survivors = {row["key"] for row in read(again) if row["outcome"] == "survived"}
        chosen = [mutant for mutant in chosen if mutant.key in survivors]
    tried = {row["key"] for row in read(results)}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(workers, initializer=copy_repository, initargs=(folder,)) as executor,
        results.open("a", encoding="utf-8") as file,
    ):
        left = [mutant for mutant in chosen if mutant.key not in tried]
        needed = {tuple(tests_of(mutant.module)): None for mutant in left}
        printed = track(executor.map(failure_of, needed), "without", len(needed))
        useless = {tests: text for tests, text in zip(needed, printed, strict=True) if text}
        useful = [mutant for mutant in left if tuple(tests_of(mutant.module)) not in useless]
        trials = [executor.submit(try_out, mutant) for mutant in useful]
        for future in track(as_completed(trials), "mutants", total=len(trials)):
            file.write(json.dumps(future.result()) + "\n")
            file.flush()
    found = [row for row in read(results) if row["key"] in {mutant.key for mutant in chosen}]
    for row in found:
        if row["outcome"] != "killed":
            click.echo(f"{row['outcome']}: {row['module']}, {row['definition']}\n{row['diff']}\n")
    table = Table("room", *(outcomes := sorted({row["outcome"] for row in found})))
    for room in sorted({room_of(row["module"]) for row in found}):
        counts = Counter(row["outcome"] for row in found if room_of(row["module"]) == room)
        table.add_row(room, *(str(counts[outcome]) for outcome in outcomes))
    Console().print(table)
    if useless:
        raise click.ClickException("these fail unbroken:\n" + "\n".join(useless.values()))


def read(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
