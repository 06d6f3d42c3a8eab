"""Save and restore the state of NumPy's global random generator in snapshots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_N_KEYS = 624  # of the Mersenne Twister


def current() -> NDArray[np.float64]:
    """Return the state with shape (627,), or shape (0,) if the generator is not the usual one.

    All numbers except the last are integers below 2**32, so float64 holds them exactly.
    """
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return np.zeros(0)
    inner = state["state"]
    rest = [inner["pos"], state["has_gauss"], state["gauss"]]
    return np.concatenate([inner["key"], rest]).astype(np.float64)


def restore(state: NDArray[np.float64]) -> None:
    """Restore a state that `current` returned."""
    if len(state) != _N_KEYS + 3:
        return
    keys, (position, has_gauss, gauss) = state[:_N_KEYS], state[_N_KEYS:]
    np.random.set_state(
        ("MT19937", keys.astype(np.uint32), int(position), int(has_gauss), float(gauss))
    )
