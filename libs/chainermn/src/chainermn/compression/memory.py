"""What a compression remembers of one parameter from one step to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import chainer
import numpy as np

from chainermn.transport.gpu.device import on_gpu, the_gpu
from chainermn.transport.reducer import Array, Dtype

#: Key of the loss scale in a state.
LOSS_SCALE = "loss_scale"


class Memory:
    """Arrays by name, whose next values take their places only when `commit` is called.

    So an exchange whose means are not used, because gradients have changed since or are not
    finite, leaves no trace, unless it works in place.

    Parameters
    ----------
    array : array
        The values of the parameter. Arrays made here are in the same memory.

    Attributes
    ----------
    shape : tuple of int
        Shape of the parameter.
    dtype : dtype
        Dtype of sums: that of the parameter, but at least float32.
    arrays : dict of str to array
    loss_scale : float
        Factor of all gradients of which the arrays are sums.
    """

    def __init__(self, array: Array) -> None:
        self.shape = array.shape
        self.dtype = _dtype_for(array)
        self.arrays: dict[str, Array] = {}
        self.loss_scale = 1.0
        self._like = array
        self._next: dict[str, Array] = {}
        self._next_loss_scale = 1.0
        self._spare: dict[str, Array] = {}
        self._in_place = False

    @property
    def size(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)

    def fits(self, array: Array) -> bool:
        """Tell whether a parameter with these values can go on with this memory."""
        is_alike = self.shape == array.shape and self.dtype == _dtype_for(array)
        return is_alike and on_gpu(self._like) == on_gpu(array)

    def zeros(self, n: int) -> Array:
        """Return ``n`` zeros of `dtype`."""
        xp = chainer.backend.get_array_module(self._like)
        return xp.zeros_like(self._like, self.dtype, shape=n)

    def place(self, array: Array) -> Array:
        """Return an array of host memory, copied to the memory of the parameter if need be."""
        return the_gpu().upload(array) if on_gpu(self._like) else array

    def start(self, loss_scale: float | None, in_place: bool) -> None:
        """Begin to set next values; any that have not been committed are forgotten.

        Parameters
        ----------
        loss_scale : float or None
            The loss scale of the gradient. If it has changed, the arrays follow it. None: that of
            the arrays, for a gradient of zeros.
        in_place : bool
            Whether to overwrite the present values, which takes less time and memory. If the next
            ones are not committed after all, all begins anew.
        """
        self.discard()
        self._in_place = in_place
        self._next_loss_scale = loss_scale or self.loss_scale

    @property
    def factor(self) -> float:
        """How much larger the loss scale of the next values is than that of the present ones."""
        return self._next_loss_scale / self.loss_scale

    def add(self, name: str, gradient: Array, decay: float = 1.0) -> Array:
        """Set the next value of an array to ``decay`` times its value plus the gradient.

        Parameters
        ----------
        name : str
        gradient : array of shape (size,)
        decay : float

        Returns
        -------
        array of shape (size,)
            The next value, which may be changed.
        """
        result, factor = self.next(name), decay * self.factor
        xp = chainer.backend.get_array_module(gradient)
        if name not in self.arrays:
            result[...] = gradient
        elif factor == 1:
            xp.add(self.arrays[name], gradient, out=result)
        else:
            xp.multiply(self.arrays[name], factor, out=result)
            xp.add(result, gradient, out=result)
        return result

    def next(self, name: str) -> Array:
        """Return an array of shape (size,) for the next value, to be filled.

        In place, it is the present one.
        """
        result = self.arrays.get(name) if self._in_place else self._spare.pop(name, None)
        if result is None:
            result = self.zeros(self.size)
        self._next[name] = result
        return result

    def set(self, name: str, array: Array) -> None:
        """Set the next value of an array."""
        self._next[name] = array

    def following(self) -> list[Array]:
        """Return the next values of all arrays that have one."""
        return list(self._next.values())

    def commit(self) -> None:
        """Let the next values take their places."""
        self._spare = {} if self._in_place else self.arrays
        self.arrays, self._next = self._next, {}
        self.loss_scale = self._next_loss_scale

    def discard(self) -> None:
        """Forget the next values of all arrays, if there are any."""
        if self._next and self._in_place:
            self.arrays = {}
        elif self._next:
            self._spare.update(self._next)
        self._next = {}

    def state(self) -> dict[str, Any]:
        """Return what is remembered, for a snapshot; nothing if that has been overwritten."""
        if not self.arrays or (self._in_place and self._next):
            return {}
        return {**self.arrays, LOSS_SCALE: np.array(self.loss_scale)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Remember what a snapshot holds."""
        arrays = dict(state)
        self.loss_scale = self._next_loss_scale = float(arrays.pop(LOSS_SCALE))
        in_host_memory = {n: np.array(chainer.backends.cuda.to_cpu(a)) for n, a in arrays.items()}
        self.arrays = {name: self.place(array) for name, array in in_host_memory.items()}


def _dtype_for(array: Array) -> Dtype:
    return np.promote_types(array.dtype, np.float32)
