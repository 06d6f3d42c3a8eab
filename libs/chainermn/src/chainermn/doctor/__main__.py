"""``python -m chainermn.doctor``."""

from __future__ import annotations

from chainermn.doctor.command import doctor

if __name__ == "__main__":
    doctor(prog_name="python -m chainermn.doctor")
