"""Stand in for the data set of a rank that reads none."""

from __future__ import annotations

from collections.abc import Sized


def create_empty_dataset(dataset: Sized) -> list[tuple[()]]:
    """Return a data set of the same length as another, without its contents.

    Use it in model parallelism, on ranks whose input comes from another rank: their iterator
    still has to step and count epochs as the others do.

    Parameters
    ----------
    dataset : sized
        Data set whose length is taken.

    Returns
    -------
    list of tuple
        ``len(dataset)`` empty tuples, so that the model is called without arguments.
    """
    return [()] * len(dataset)
