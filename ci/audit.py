"""Look up the known vulnerabilities of all releases in ``ci/constraints``.

Exits with status 1 if there are any. If it cannot look them up, it says so and exits with 0.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).resolve().parent / "constraints"
#: Advisories that do not concern this project: any of an advisory's names, and the reason.
ACCEPTED: dict[str, str] = {}


def main() -> int:
    locks = [lock.read_text() for lock in CONSTRAINTS.glob("*.txt")]
    pins = {
        pin for lock in locks for pin in re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.MULTILINE)
    }
    answers = [answer for releases in without_repeated_names(pins) for answer in ask(releases)]
    checked = [answer for answer in answers if "vulns" in answer]
    found = [line for answer in checked for line in advisories(answer)]
    for line in found:
        print(f"audit: {line}")
    if found:
        print(
            "audit: update with ./noxw -s lock, or explain in ci/audit.py why it does not matter"
        )
    if len(checked) < len(pins):
        missing = len(pins) - len(checked)
        print(f"audit: NOT CHECKED: no advisories available for {missing} of {len(pins)} releases")
    elif not found:
        print(f"audit: no known vulnerabilities in {len(checked)} releases")
    return 1 if found else 0


def without_repeated_names(pins: set[tuple[str, str]]) -> Iterator[dict[str, str]]:
    """Split the releases into groups in which each name occurs once, as pip-audit requires."""
    rest = pins
    while rest:
        releases = dict(rest)
        yield releases
        rest = rest - releases.items()


def ask(releases: dict[str, str]) -> list[dict[str, Any]]:
    """Return pip-audit's answer for each release, or no answers if it got none."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{name}=={version}\n" for name, version in releases.items())
        file.flush()
        pip_audit = [sys.executable, "-m", "pip_audit", "--disable-pip", "--no-deps"]
        options = ["--format", "json", "--progress-spinner", "off", "--timeout", "5"]
        command = [*pip_audit, *options, "--requirement", file.name, *sys.argv[1:]]
        result = subprocess.run(command, capture_output=True, text=True)
    try:
        return list(json.loads(result.stdout)["dependencies"])
    except ValueError:
        print(f"audit: {(result.stderr.strip() or 'no answer').splitlines()[-1][:200]}")
        return []


def advisories(answer: dict[str, Any]) -> Iterator[str]:
    """Describe the advisories for one release, except those accepted."""
    for advisory in answer["vulns"]:
        names = {advisory["id"], *advisory["aliases"]}
        if not names & ACCEPTED.keys():
            fixed = ", ".join(advisory["fix_versions"]) or "no release"
            yield (
                f"{answer['name']} {answer['version']}: {', '.join(sorted(names))}, "
                f"fixed in {fixed}: {advisory['description'][:200]}"
            )


if __name__ == "__main__":
    sys.exit(main())
