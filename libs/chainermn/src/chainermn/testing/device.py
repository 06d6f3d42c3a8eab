"""Devices by number."""

from __future__ import annotations

import chainer


def get_device(device_id: int | None = None, use_chainerx: bool = False) -> chainer.backend.Device:
    """Return a GPU by its number, or the CPU if there is no number.

    Parameters
    ----------
    device_id : int, optional
    use_chainerx : bool
        Not supported.

    Raises
    ------
    ValueError
        If ChainerX is asked for.
    """
    if use_chainerx:
        raise ValueError("ChainerX arrays are not supported; use NumPy's or CuPy's")
    return chainer.get_device("@numpy" if device_id is None else f"@cupy:{device_id}")
