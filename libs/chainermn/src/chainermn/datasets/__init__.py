"""Divide data sets among the ranks."""

from chainermn.datasets.distributed_sampler import (
    DistributedOrderSampler,
    create_distributed_sampler,
)
from chainermn.datasets.empty_dataset import create_empty_dataset
from chainermn.datasets.scatter import (
    DataSizeError,
    get_epoch_trigger,
    get_n_iterations_for_one_epoch,
    scatter_dataset,
    scatter_index,
)

__all__ = [
    "DataSizeError",
    "DistributedOrderSampler",
    "create_distributed_sampler",
    "create_empty_dataset",
    "get_epoch_trigger",
    "get_n_iterations_for_one_epoch",
    "scatter_dataset",
    "scatter_index",
]
