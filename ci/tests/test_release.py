"""The dry run of a release names what disagrees, and says what to do."""

from __future__ import annotations

import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from ci.release import __main__ as release

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder with the files of the repository that say what a release is."""
    licenses = [f"libs/{lib}/LICENSE" for lib in release.LIBS]
    for name in (*release.PLACES, "LICENSE", *licenses):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(release.read(ROOT / name), encoding="utf-8")
    return tmp_path


def change(file: Path, old: str, new: str) -> None:
    text = release.read(file)
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_repository_agrees_with_itself(copy: Path) -> None:
    assert release.check_versions(ROOT) == release.check_versions(copy)
    release.check_changelog(ROOT)
    release.check_licenses(ROOT)


@pytest.mark.parametrize("place", [place for place in release.PLACES if place != release.VERSION])
def test_place_with_another_version_is_named(copy: Path, place: str) -> None:
    change(copy / place, release.check_versions(copy), "7.7.7")
    with pytest.raises(release.Failed, match=rf"but {place} says 7\.7\.7\n"):
        release.check_versions(copy)


@pytest.mark.parametrize("page", ["docs/page.md", "libs/chainermn/pyproject.toml"])
def test_page_with_another_version_is_named(copy: Path, page: str) -> None:
    (copy / page).parent.mkdir(exist_ok=True)
    (copy / page).write_text("pip install chainer-fast==7.7.7 numpy==2.0.0\n")
    with pytest.raises(release.Failed, match=rf"{page} \(7\.7\.7\) says 7\.7\.7\n"):
        release.check_versions(copy)


def test_changelog_without_an_entry_fails(copy: Path) -> None:
    (copy / "CHANGELOG.md").write_text("# Changes\n\n## 8.0.1\n\n## 8.0.0\n\n- All.\n")
    with pytest.raises(release.Failed, match=r"no '- ' line under '## 8\.0\.1'"):
        release.check_changelog(copy)


@pytest.mark.parametrize("lib", release.LIBS)
def test_other_license_fails(copy: Path, lib: str) -> None:
    change(copy / f"libs/{lib}/LICENSE", "MIT", "BSD")
    with pytest.raises(release.Failed, match=f"cp LICENSE libs/{lib}/LICENSE"):
        release.check_licenses(copy)


SOURCES = ("src/chainermn/__init__.py", "src/chainermn/py.typed", "command/start.py", "hook.pth")
HELD = (
    *("_chainermn_dist/chainermn/__init__.py", "_chainermn_dist/chainermn/py.typed"),
    *("start.py", "hook.pth", "c-8.dist-info/METADATA", "c-8.dist-info/licenses/LICENSE"),
)


def compare(folder: Path, held: tuple[str, ...]) -> None:
    sdist, wheel = folder / "c-8.tar.gz", folder / "c-8-py3-none-any.whl"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in SOURCES:
            archive.addfile(tarfile.TarInfo(f"c-8/{name}"))
    with zipfile.ZipFile(wheel, "w") as archive_of_wheel:
        for name in held:
            archive_of_wheel.writestr(name, "")
    release.check_wheel(wheel, sdist, "do this")


def test_wheel_with_all_sources_passes(tmp_path: Path) -> None:
    compare(tmp_path, HELD)


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        (HELD[1:], "lacks chainermn/__init__.py"),
        ((*HELD, "tests/test_it.py"), "has tests/test_it.py, which the sdist lacks"),
        (HELD[:-1], "has no LICENSE"),
        ((HELD[0], *HELD[2:]), "has no py.typed"),
    ],
)
def test_wheel_with_other_files_fails(tmp_path: Path, held: tuple[str, ...], problem: str) -> None:
    with pytest.raises(release.Failed, match=re.escape(problem)):
        compare(tmp_path, held)


def test_command_that_fails_shows_its_output_and_what_to_do() -> None:
    with pytest.raises(release.Failed, match=r"no such\n  what to do: try again"):
        release.run(["sh", "-c", "echo no such; exit 3"], "try again")
