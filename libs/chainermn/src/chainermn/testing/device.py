"""Return a device by its number."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import chainer


def get_device(device_id: int | None = None, use_chainerx: bool = False) -> chainer.backend.Device:
    """Return the CPU, or the GPU with a number.

    Parameters
    ----------
    device_id : int, optional
        Number of the GPU; None for the CPU.
    use_chainerx : bool
        Must be False; accepted for scripts written for the original ChainerMN.

    Returns
    -------
    chainer.backend.Device
        Device, which is not made current.

    Raises
    ------
    ValueError
        If ``use_chainerx`` is True, because ChainerX is not supported.

    Examples
    --------
    >>> import chainermn.testing
    >>> chainermn.testing.get_device()
    <CpuDevice (numpy)>
    """
    import chainer  # here, because importing this package must not take long

    if use_chainerx:
        raise ValueError("ChainerX arrays are not supported; use NumPy's or CuPy's")
    return chainer.get_device("@numpy" if device_id is None else f"@cupy:{device_id}")
