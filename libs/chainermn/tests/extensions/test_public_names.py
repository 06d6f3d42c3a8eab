"""Scripts written for ChainerMN 1 to 7 find the names and parameters they use."""

from __future__ import annotations

import importlib
import inspect

import pytest

MIB = 2**20

#: Parameters of ChainerMN 7.8.1; later ones may follow.
SIGNATURES = {
    "datasets.scatter_dataset": (
        f"dataset, comm, root=0, shuffle=False, seed=None, max_buf_len={256 * MIB}, *, "
        "force_equal_length=True"
    ),
    "datasets.scatter_index": "n_total_samples, comm, root=0, *, force_equal_length=True",
    "datasets.create_empty_dataset": "dataset",
    "datasets.scatter.get_n_iterations_for_one_epoch": "dataset, local_batch_size, comm",
    "datasets.scatter.get_epoch_trigger": "n_epochs, dataset, local_batch_size, comm",
    "optimizers.create_multi_node_optimizer": (
        "actual_optimizer, communicator, double_buffering=False, zero_fill=True"
    ),
    "iterators.create_multi_node_iterator": "actual_iterator, communicator, rank_master=0",
    "iterators.create_synchronized_iterator": "actual_iterator, communicator",
    "extensions.create_multi_node_evaluator": "actual_evaluator, communicator",
    "extensions.AllreducePersistent": "model, comm",
    "extensions.ObservationAggregator": (
        "comm, original_key, aggregated_key=None, *, comm_trigger=(1, 'iteration'), "
        "aggregator=None"
    ),
    "extensions.MultiNodeEarlyStoppingTrigger": (
        "comm, *, check_trigger=(1, 'epoch'), monitor='main/loss', patience=None, mode='auto', "
        "verbose=False, max_trigger=(100, 'epoch'), suffix='_aggregated', **kwargs"
    ),
    "extensions.multi_node_snapshot": "comm, snapshot, replica_sets",
    "extensions.create_multi_node_checkpointer": (
        "name, comm, cp_interval=5, gc_interval=5, path=None"
    ),
    "dataset.scatter_dataset": "dataset, comm",
    "multi_node_evaluator.create_multi_node_evaluator": "actual_evaluator, communicator",
    "multi_node_optimizer.create_multi_node_optimizer": "actual_optimizer, communicator",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    module, _, attribute = f"chainermn.{name}".rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    shown = str(inspect.Signature(bare))
    assert shown.startswith(f"({SIGNATURES[name]}")


def test_generic_multi_node_evaluator() -> None:
    from chainermn.extensions import GenericMultiNodeEvaluator

    names = list(inspect.signature(GenericMultiNodeEvaluator).parameters)
    assert names == ["comm", "iterator", "target", "device", "converter", "root", "kwargs"]


@pytest.mark.parametrize(
    "module",
    [
        "allreduce_persistent",
        "checkpoint",
        "multi_node_early_stopping_trigger",
        "multi_node_evaluator",
        "observation_aggregator",
    ],
)
def test_modules_of_extensions(module: str) -> None:
    importlib.import_module(f"chainermn.extensions.{module}")
