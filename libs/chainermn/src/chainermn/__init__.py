"""Distributed training for Chainer."""

from chainermn import (
    communicators,
    dataset,
    datasets,
    extensions,
    functions,
    global_except_hook,
    iterators,
    links,
    multi_node_evaluator,
    multi_node_optimizer,
    nccl,
    optimizers,
)
from chainermn.communicators import CommunicatorBase, create_communicator
from chainermn.datasets import (
    DataSizeError,
    create_distributed_sampler,
    create_empty_dataset,
    get_epoch_trigger,
    get_n_iterations_for_one_epoch,
    scatter_dataset,
    scatter_index,
)
from chainermn.extensions import create_multi_node_checkpointer, create_multi_node_evaluator
from chainermn.iterators import create_multi_node_iterator, create_synchronized_iterator
from chainermn.links import MultiNodeChainList
from chainermn.optimizers import create_multi_node_optimizer

__version__ = "8.0.0"

__all__ = [
    "CommunicatorBase",
    "DataSizeError",
    "MultiNodeChainList",
    "communicators",
    "create_communicator",
    "create_distributed_sampler",
    "create_empty_dataset",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "create_multi_node_iterator",
    "create_multi_node_optimizer",
    "create_synchronized_iterator",
    "dataset",
    "datasets",
    "extensions",
    "functions",
    "get_epoch_trigger",
    "get_n_iterations_for_one_epoch",
    "global_except_hook",
    "iterators",
    "links",
    "multi_node_evaluator",
    "multi_node_optimizer",
    "nccl",
    "optimizers",
    "scatter_dataset",
    "scatter_index",
]

global_except_hook.add_hook_if_enabled()
