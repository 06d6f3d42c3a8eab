"""Distributed training for Chainer.

Public names are imported when they are first used. So `chainermn launch` and `chainermn doctor`
start at once, even if Chainer, which everything else needs, cannot be imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

from chainermn import global_except_hook
from chainermn.process.garbage import no_garbage_collection
from chainermn.version import VERSION

if TYPE_CHECKING:
    from chainermn import (
        agreement,
        communicators,
        compression,
        dataset,
        datasets,
        extensions,
        files,
        functions,
        iterators,
        launch,
        links,
        multi_node_evaluator,
        multi_node_optimizer,
        nccl,
        optimizers,
        progress,
        spans,
    )
    from chainermn.communicators import CommunicatorBase, create_communicator
    from chainermn.communicators.devices import choose_device
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
    from chainermn.profiling.timeline_file import record_timeline

__version__ = VERSION

__all__ = [
    "CommunicatorBase",
    "DataSizeError",
    "MultiNodeChainList",
    "agreement",
    "choose_device",
    "communicators",
    "compression",
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
    "files",
    "functions",
    "get_epoch_trigger",
    "get_n_iterations_for_one_epoch",
    "global_except_hook",
    "iterators",
    "launch",
    "links",
    "multi_node_evaluator",
    "multi_node_optimizer",
    "nccl",
    "optimizers",
    "progress",
    "record_timeline",
    "scatter_dataset",
    "scatter_index",
    "spans",
]

_DEFINED_IN = {
    "CommunicatorBase": "communicators",
    "DataSizeError": "datasets",
    "MultiNodeChainList": "links",
    "choose_device": "communicators.devices",
    "create_communicator": "communicators",
    "create_distributed_sampler": "datasets",
    "create_empty_dataset": "datasets",
    "create_multi_node_checkpointer": "extensions",
    "create_multi_node_evaluator": "extensions",
    "create_multi_node_iterator": "iterators",
    "create_multi_node_optimizer": "optimizers",
    "create_synchronized_iterator": "iterators",
    "get_epoch_trigger": "datasets",
    "get_n_iterations_for_one_epoch": "datasets",
    "record_timeline": "profiling.timeline_file",
    "scatter_dataset": "datasets",
    "scatter_index": "datasets",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'chainermn' has no attribute {name!r}")
    with no_garbage_collection():
        module = importlib.import_module(f"chainermn.{_DEFINED_IN.get(name, name)}")
    return getattr(module, name) if name in _DEFINED_IN else module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


global_except_hook.add_hook_if_enabled()
