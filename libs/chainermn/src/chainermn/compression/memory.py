"""Arrays that a compression keeps for one parameter from one step to the next."""

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
    """Arrays by name, whose next values replace the present ones only when `commit` is called.

    So an exchange has no effect if its means are not used, because gradients have changed or are
    not finite, unless it works in place.

    Parameters
    ----------
    array : array
        Values of the parameter. New arrays are in the same memory.

    Attributes
    ----------
    shape : tuple of int
        Shape of the parameter.
    dtype : dtype
        Dtype of sums: that of the parameter, or float32 if that is wider.
    arrays : dict of str to array
        Present values.
    loss_scale : float
        Loss scale of the gradients that the arrays are sums of.
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
        """Tell whether a parameter with these values can continue with this memory."""
        is_alike = self.shape == array.shape and self.dtype == _dtype_for(array)
        return is_alike and on_gpu(self._like) == on_gpu(array)

    def zeros(self, n: int) -> Array:
        """Return ``n`` zeros of `dtype`."""
        xp = chainer.backend.get_array_module(self._like)
        return xp.zeros_like(self._like, self.dtype, shape=n)

    def place(self, array: Array) -> Array:
        """Return an array in host memory, copied to the memory of the parameter if necessary."""
        return the_gpu().upload(array) if on_gpu(self._like) else array

    def start(self, loss_scale: float | None, in_place: bool) -> None:
        """Start to set next values, and drop those that were not committed.

        Parameters
        ----------
        loss_scale : float or None
            Loss scale of the gradient; if it has changed, the arrays are rescaled. None, for a
            gradient of zeros, stands for the loss scale of the arrays.
        in_place : bool
            Whether to overwrite the present values, which saves time and memory. If the next
            values are then not committed, the memory starts from zero.
        """
        self.discard()
        self._in_place = in_place
        self._next_loss_scale = loss_scale or self.loss_scale

    @property
    def factor(self) -> float:
        """Ratio of the loss scale of the next values to that of the present ones."""
        return self._next_loss_scale / self.loss_scale

    def add(self, name: str, gradient: Array, decay: float = 1.0) -> Array:
        """Set the next value of an array to ``decay`` times its value plus the gradient.

        Parameters
        ----------
        name : str
            Name of the array.
        gradient : array of shape (size,)
            Gradient to add.
        decay : float
            Factor of the present value.

        Returns
        -------
        array of shape (size,)
            Next value; the caller may change it.
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
        """Return an array of shape (size,) that the caller fills with the next value.

        In place, it is the present value.
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
        """Replace the present values by the next ones."""
        self._spare = {} if self._in_place else self.arrays
        self.arrays, self._next = self._next, {}
        self.loss_scale = self._next_loss_scale

    def discard(self) -> None:
        """Drop the next values of all arrays, if there are any."""
        if self._next and self._in_place:
            self.arrays = {}
        elif self._next:
            self._spare.update(self._next)
        self._next = {}

    def state(self) -> dict[str, Any]:
        """Return the arrays and the loss scale for a snapshot; nothing if they are overwritten."""
        if not self.arrays or (self._in_place and self._next):
            return {}
        return {**self.arrays, LOSS_SCALE: np.array(self.loss_scale)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the arrays and the loss scale of a snapshot."""
        arrays = dict(state)
        self.loss_scale = self._next_loss_scale = float(arrays.pop(LOSS_SCALE))
        in_host_memory = {n: np.array(chainer.backends.cuda.to_cpu(a)) for n, a in arrays.items()}
        self.arrays = {name: self.place(array) for name, array in in_host_memory.items()}


def _dtype_for(array: Array) -> Dtype:
    return np.promote_types(array.dtype, np.float32)
