"""Look up a device by its number."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import chainer


def get_device(device_id: int | None = None, use_chainerx: bool = False) -> chainer.backend.Device:
    """Return the GPU ``device_id``, or the CPU if it is None.

    Raises
    ------
    ValueError
        If ``use_chainerx``, which is not supported.
    """
    import chainer  # not above: those who run jobs import this package, too

    if use_chainerx:
        raise ValueError("ChainerX arrays are not supported; use NumPy's or CuPy's")
    return chainer.get_device("@numpy" if device_id is None else f"@cupy:{device_id}")
