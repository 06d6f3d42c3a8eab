"""Create a data set for ranks that read no data."""

from __future__ import annotations

from collections.abc import Sized


def create_empty_dataset(dataset: Sized) -> list[tuple[()]]:
    """Create a data set without contents, with the same length as another one.

    Use it in model parallelism, on ranks whose input comes from another rank. Their iterators must
    still count iterations and epochs like those of the other ranks.

    Parameters
    ----------
    dataset : sized
        Data set that gives the length.

    Returns
    -------
    list of tuple
        ``len(dataset)`` empty tuples; the updater then calls the model without arguments.

    Examples
    --------
    >>> chainermn.create_empty_dataset(["a", "b", "c"])
    [(), (), ()]
    """
    return [()] * len(dataset)
