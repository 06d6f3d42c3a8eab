"""Data sets, under the name of this module in ChainerMN 1.0."""

from chainermn.datasets import (
    DataSizeError,
    create_empty_dataset,
    get_epoch_trigger,
    get_n_iterations_for_one_epoch,
    scatter_dataset,
)

__all__ = [
    "DataSizeError",
    "create_empty_dataset",
    "get_epoch_trigger",
    "get_n_iterations_for_one_epoch",
    "scatter_dataset",
]
