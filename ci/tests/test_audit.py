"""ci/audit.py fails if an advisory is known, and says what it could not look up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[1]
# Answers as pip-audit does, for the releases in a file of requirements.
STAND_IN = """
import json, sys
from pathlib import Path

lines = Path(sys.argv[sys.argv.index("--requirement") + 1]).read_text().split()
pins = [line.split("==") for line in lines]
assert len(dict(pins)) == len(pins)
advisory = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["99"], "description": "Bad."}
vulns = {"chainer": [advisory]} if KNOWN else {}
print(json.dumps({"dependencies": [
    {"name": name, "skip_reason": "not found"} if name in MISSING
    else {"name": name, "version": version, "vulns": vulns.get(name, [])}
    for name, version in pins
]}))
"""
CHAINER = "audit: chainer 7.8.1: CVE-1, PYSEC-1, fixed in 99: Bad.\n"


def audit(folder: Path, pip_audit: str, accepted: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run the audit with this source of `pip_audit`, and with some advisories accepted."""
    (folder / "pip_audit.py").write_text(pip_audit)
    reasons = dict.fromkeys(accepted, "a test demands it")
    code = f"import audit, sys; audit.ACCEPTED = {reasons}; sys.exit(audit.main())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{CI}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    return result.returncode, result.stdout


def stand_in(known: bool = False, missing: tuple[str, ...] = ()) -> str:
    return f"KNOWN, MISSING = {known}, {missing}{STAND_IN}"


def test_nothing_known(tmp_path: Path) -> None:
    status, said = audit(tmp_path, stand_in())
    assert status == 0
    assert re.fullmatch(r"audit: no known vulnerabilities in \d+ releases\n", said)


def test_a_known_vulnerability_fails_even_if_others_could_not_be_looked_up(tmp_path: Path) -> None:
    status, said = audit(tmp_path, stand_in(known=True, missing=("pip",)))
    assert status == 1
    assert CHAINER in said
    assert "NOT CHECKED: no advisories available for 1 of" in said


@pytest.mark.parametrize("name", ["CVE-1", "PYSEC-1"])
def test_an_accepted_one_does_not_fail(tmp_path: Path, name: str) -> None:
    status, said = audit(tmp_path, stand_in(known=True), accepted=(name,))
    assert status == 0
    assert CHAINER not in said


def test_without_a_network(tmp_path: Path) -> None:
    status, said = audit(tmp_path, "raise SystemExit('no route to host')")
    assert status == 0
    assert "audit: no route to host\n" in said
    assert re.search(r"NOT CHECKED: no advisories available for (\d+) of \1 releases", said)
