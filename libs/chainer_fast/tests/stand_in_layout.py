"""Arrays in host memory whose results have C order, as CuPy's have, whatever their strides are."""

import numpy as np

from chainer_fast.channels_last.layout import converted


class Array(np.ndarray):
    """A NumPy array that passes for a CuPy array: only copies keep strides."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        given = [np.asarray(each) if isinstance(each, Array) else each for each in inputs]
        if out:
            options["out"] = tuple(np.asarray(each) for each in out)
        found = getattr(ufunc, method)(*given, **options)
        return out[0] if out else in_c_order(found)

    def __array_function__(self, function, types, args, options):
        found = super().__array_function__(function, types, args, options)
        if function is np.concatenate:
            return in_c_order(found)
        return found.view(Array) if type(found) is np.ndarray else found


def in_c_order(array):
    """Return an array as CuPy gives results."""
    return np.array(array, order="C").view(Array)


def channels_last(array):
    """Return an array that lies channels last."""
    return converted(np, np.asarray(array)).view(Array)


def with_gaps(array):
    """Return a view of every second channel of an array that lies channels last."""
    wide = channels_last(np.repeat(array, 2, axis=1))
    return wide[:, ::2]
