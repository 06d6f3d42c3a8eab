"""Devices by number, as in the original `chainermn.testing`."""

from __future__ import annotations

import chainer


def get_device(device_id: int | None = None, use_chainerx: bool = False) -> chainer.backend.Device:
    """Return the GPU of this number, or the CPU without one.

    Parameters
    ----------
    device_id : int, optional
        Number of the GPU on this host.
    use_chainerx : bool
        Not supported: must be False.

    Raises
    ------
    ValueError
        If ``use_chainerx`` is True.
    """
    if use_chainerx:
        raise ValueError("ChainerX arrays are not supported; use NumPy's or CuPy's")
    return chainer.get_device("@numpy" if device_id is None else f"@cupy:{device_id}")
