"""Rehearse a release without publishing it: ``./noxw -s release_dry_run``.

The first step that fails says what is wrong and what to do. The files that were built, and passed,
are in ``dist``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBS = ("chainer_compat", "chainer_fast", "chainermn")
VERSION = "libs/chainermn/src/chainermn/version.py"
#: Where the version is written, and how.
PLACES = {
    VERSION: r'^VERSION = "(.+)"$',
    "libs/chainer_compat/src/chainer_compat/__init__.py": r'^__version__ = "(.+)"$',
    "libs/chainer_fast/src/chainer_fast/__init__.py": r'^__version__ = "(.+)"$',
    "CHANGELOG.md": r"^## (\S+)",
}
#: How pages and requirements write the version, if they do.
ON_PAGES = r"\bchainer(?:mn|[-_]compat|[-_]fast)(?:==|-)(\d+\.\d+\.\d+)\b"
PIP = "pip>=25.3"  # the first that reads PIP_BUILD_CONSTRAINT


class Failed(Exception):
    """What is wrong, and what to do."""

    def __init__(self, wrong: str, remedy: str) -> None:
        super().__init__(f"{wrong.strip()}\n  what to do: {remedy}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--final", action="store_true", help="require all that publishing needs")
    arguments = parser.parse_args()
    dist = ROOT / "dist"
    version = check_versions(ROOT)
    done(f"all places say that this is version {version}")
    check_changelog(ROOT)
    check_licenses(ROOT)
    done("the changelog has entries, and each library has the license")
    left = list(left_to_do(ROOT, version))
    if left and arguments.final:
        raise Failed("\n".join(left), "do that and commit it, or leave out --final")
    build(dist)
    done("wheels and sdists build")
    check_contents(dist)
    done("they hold the files that git has, without the tests, and their descriptions render")
    for pattern in ("*.whl", "*.tar.gz"):
        try_installed(sorted(dist.glob(pattern)), version)
        done(f"{pattern}: in an empty environment, installs, and two ranks train")
    for line in left:
        print(f"– before publishing: {line}")  # noqa: RUF001
    print(f"ready in {dist}: {', '.join(sorted(path.name for path in dist.iterdir()))}")


def check_versions(root: Path) -> str:
    """Return the version, which is the same in all places."""
    found = {
        place: re.search(how, read(root / place), re.MULTILINE) for place, how in PLACES.items()
    }
    said = {place: match[1] if match else "no version" for place, match in found.items()}
    pages = [path for path in root.glob("docs/**/*.md") if "results" not in path.parts]
    pages += [*root.glob("*.md"), *root.glob("libs/*/*.md"), *root.glob("libs/*/pyproject.toml")]
    for page in pages:
        for version in set(re.findall(ON_PAGES, read(page))):
            said[f"{page.relative_to(root)} ({version})"] = version
    version = said[VERSION]
    others = [f"{place} says {other}" for place, other in said.items() if other != version]
    if others:
        wrong = f"{VERSION} says {version}, but {' and '.join(others)}"
        raise Failed(wrong, "write the same version into all of them")
    return version


def check_changelog(root: Path) -> None:
    entry = read(root / "CHANGELOG.md").partition("\n## ")[2].partition("\n## ")[0]
    heading, _, text = entry.partition("\n")
    if not re.search(r"^- ", text, re.MULTILINE):
        raise Failed(f"CHANGELOG.md has no '- ' line under '## {heading}'", "say what changed")


def check_licenses(root: Path) -> None:
    for lib in LIBS:
        copy = root / "libs" / lib / "LICENSE"
        if not copy.exists() or read(copy) != read(root / "LICENSE"):
            wrong = f"libs/{lib}/LICENSE is not a copy of LICENSE"
            raise Failed(wrong, f"cp LICENSE libs/{lib}/LICENSE")


def left_to_do(root: Path, version: str) -> Iterator[str]:
    """Yield what a dry run accepts and publishing does not."""
    if not re.search(r"^## \S+ \(\d{4}-\d\d-\d\d\)$", read(root / "CHANGELOG.md"), re.MULTILINE):
        yield f"CHANGELOG.md: give {version} its date: '## {version} (2030-01-31)'"
    if changed := git(root, "status", "--porcelain"):
        yield f"commit what git status shows: {', '.join(changed)}"
    if f"v{version}" not in git(root, "tag", "--points-at", "HEAD"):
        yield f"git tag v{version}"
    for lib in LIBS:
        links = re.findall(r"\]\((?!https?:|#)[^)\s]+\)", read(root / "libs" / lib / "README.md"))
        if links:
            yield (
                f"libs/{lib}/README.md: links to files of the repository ({len(links)} here) lead "
                "nowhere on the package index: write addresses in their place"
            )


def build(dist: Path) -> None:
    """Make a new ``dist``; each wheel is built from its sdist."""
    shutil.rmtree(dist, ignore_errors=True)
    for lib in LIBS:
        command = [sys.executable, "-m", "build", "--outdir", str(dist), str(ROOT / "libs" / lib)]
        run(command, f"mend libs/{lib}/pyproject.toml, or the file that the message names")


def check_contents(dist: Path) -> None:
    described = "mend the README.md or the [project] table of that library"
    files = sorted(map(str, dist.iterdir()))
    run([sys.executable, "-m", "twine", "check", "--strict", *files], described)
    for lib in LIBS:
        folder = ROOT / "libs" / lib
        remedy = f"commit or remove the files, or name them in libs/{lib}/pyproject.toml"
        run([sys.executable, "-m", "check_sdist", "--source-dir", str(folder)], remedy)
        (sdist,), (wheel,) = dist.glob(f"{lib}-*.tar.gz"), dist.glob(f"{lib}-*.whl")
        remedy = f"see [tool.hatch.build.targets.wheel] in libs/{lib}/pyproject.toml"
        run([sys.executable, "-m", "check_wheel_contents", str(wheel)], remedy, cwd=folder)
        check_wheel(wheel, sdist, remedy)


def check_wheel(wheel: Path, sdist: Path, remedy: str) -> None:
    """Compare the files in a wheel with the sources in the sdist."""
    with tarfile.open(sdist) as archive:
        sources = [name.partition("/")[2] for name in archive.getnames()]
    with zipfile.ZipFile(wheel) as archive_of_wheel:
        held = archive_of_wheel.namelist()
    # They may end up in any folder of the wheel.
    modules = {name.partition("/")[2] for name in sources if name.startswith(("src/", "command/"))}
    of_wheel = {
        name.removeprefix("_chainermn_dist/") for name in held if ".dist-info/" not in name
    }
    of_wheel -= set(sources)  # the hook of chainer_compat, which stays at the top
    problems = [f"lacks {name}" for name in sorted(modules - of_wheel)]
    problems += [f"has {name}, which the sdist lacks" for name in sorted(of_wheel - modules)]
    for wanted in ("/py.typed", ".dist-info/licenses/LICENSE"):
        if not any(name.endswith(wanted) for name in held):
            problems.append(f"has no {wanted.rpartition('/')[2]}")
    if problems:
        raise Failed(f"{wheel.name} {', '.join(problems)}", remedy)


def try_installed(archives: list[Path], version: str) -> None:
    """Install the libraries away from the repository, and train."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PIP_BUILD_CONSTRAINT"] = (ROOT / "ci/build-constraints.txt").as_uri()
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        elsewhere = Path(folder)
        programs = elsewhere / "environment/bin"
        script = shutil.copy(Path(__file__).with_name("on_two_ranks.py"), elsewhere)

        def try_(remedy: str, *command: str) -> str:
            return run(list(command), remedy, cwd=elsewhere, env=env)

        make = [sys.executable, "-m", "virtualenv", "--quiet", str(programs.parent)]
        try_("read what virtualenv says", *make)
        python = str(programs / "python")
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        try_("check the network", *pip, "install", PIP)
        *others, library = (f"{archive}" for archive in archives)
        wanted = [*others, f"{library}[mpich]"]
        try_("mend the requirements in libs/*/pyproject.toml", *pip, "install", *wanted)
        try_("mend the requirements in libs/*/pyproject.toml", *pip, "check")
        shown = try_("mend [project.scripts]", str(programs / "chainermn"), "--version")
        if version not in shown.split():
            raise Failed(f"chainermn --version prints {shown.strip()}", f"look at {VERSION}")
        ranks = [str(programs / "mpiexec"), "-n", "2", python, "-I", str(script)]
        try_("`./noxw -s install_tests` may tell more", *ranks)


def run(
    command: list[str], remedy: str, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> str:
    """Return a command's output; if the command fails, fail with that output."""
    ended = subprocess.run(
        command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if ended.returncode:
        raise Failed(f"{' '.join(command)}\n{ended.stdout}", remedy)
    return ended.stdout


def git(root: Path, *arguments: str) -> list[str]:
    return run(["git", *arguments], "this needs git and a clone", cwd=root).splitlines()


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def done(text: str) -> None:
    print(f"✓ {text}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except Failed as failure:
        sys.exit(f"✗ {failure}")
