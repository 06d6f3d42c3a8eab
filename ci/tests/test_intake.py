"""What reads files past the library is found, and what writes files is not."""

from pathlib import Path

import pytest

from ci.intake import findings, main, modules_of_apps


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("text = open(path).read()", ["open"]),
        ("with open(path, 'rb') as file: pass", ["open"]),
        ("read = open", ["open"]),
        ("open('a')", ["open"]),
        ("lines = map(open, paths)", ["open"]),
        ("from PIL.Image import open as imread\nimread(path)", ["PIL.Image.open"]),
        ("np.fromfile(path)", ["np.fromfile"]),
        ("np.load(path)", []),
        ("path.open()", ["path.open"]),
        ("path.open(mode='r')", ["path.open"]),
        ("gzip.open(path, 'rt')", ["gzip.open"]),
        ("Image.open(path)", ["Image.open"]),
        ("os.open(path, flags)", ["os.open"]),
        ("run_on_root(comm, 0, 'test', path.read_bytes)", ["path.read_bytes"]),
        (
            "Path('a').read_text().splitlines()",
            ["Path('a').read_text().splitlines", "Path('a').read_text"],
        ),
        ("open(path, 'w')", []),
        ("path.open('x', encoding='utf-8')", []),
        ("gzip.open(path, mode='ab')", []),
        ("path.write_text('w')", []),
        ("reader.open_regular(path)", []),
        ("from chainermn.files import read_text\nread_text(path).split()", []),
        ("from chainermn import files\nfiles.read_bytes(path, 9)", []),
        ("from chainermn.datasets import pictures as p\np.open(path)", []),
        ("from another import files\nfiles.read_bytes(path)", ["files.read_bytes"]),
        ("'a word: open'  # open(path)", []),
    ],
)
def test_what_is_found(line: str, found: list[str]) -> None:
    assert sorted(what for _, what in findings(line)) == sorted(found)


def test_a_finding_fails_and_names_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.py"
    path.write_text("import gzip\n\nlines = gzip.open('a.gz')\n")
    assert main([str(path)]) == 1
    assert capsys.readouterr().out.startswith(f"{path}:3: gzip.open: let chainermn.files or")
    path.write_text("import gzip\n")
    assert main([str(path)]) == 0


def test_tests_of_apps_are_exempt() -> None:
    names = modules_of_apps()
    assert {"apps/cifar/data.py", "apps/imagenet/models/alex.py"} < set(names)
    assert not [name for name in names if "test" in name or "conftest" in name]
