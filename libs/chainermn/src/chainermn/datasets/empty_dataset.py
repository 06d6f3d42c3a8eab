"""A stand-in for the data set of a rank that reads none."""

from __future__ import annotations

from collections.abc import Sized


def create_empty_dataset(dataset: Sized) -> list[tuple[()]]:
    """Return a data set as long as another, without its contents.

    For ranks that hold an inner part of a model divided among ranks: their iterator must step
    and count epochs as the others' do, but their input comes from another rank.

    Parameters
    ----------
    dataset : sized
        Only its length counts.

    Returns
    -------
    list of tuple
        ``len(dataset)`` empty tuples, so that the model is called without arguments.
    """
    return [()] * len(dataset)
