"""Reported values and the decision to stop, across ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import chainer
import numpy as np
import pytest

import chainermn
from chainermn.extensions import MultiNodeEarlyStoppingTrigger, ObservationAggregator


def at(iteration: int, observation: dict[str, Any], epoch_length: int = 2) -> Any:
    """Return what a trainer shows to extensions and triggers."""
    updater = SimpleNamespace(
        iteration=iteration,
        epoch=iteration // epoch_length,
        epoch_detail=iteration / epoch_length,
        previous_epoch_detail=(iteration - 1) / epoch_length,
        is_new_epoch=iteration % epoch_length == 0,
    )
    return SimpleNamespace(updater=updater, observation=observation)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("wrap", [float, np.float32, np.array])
def test_mean_of_an_iteration(comm: Any, wrap: Any) -> None:
    aggregator = ObservationAggregator(comm, "loss", "mean")
    observation = {"loss": wrap(comm.rank + 0.5)}
    aggregator(at(1, observation))
    assert observation["mean"] == comm.size / 2
    assert isinstance(observation["mean"], float)
    ObservationAggregator(comm, "loss")(at(1, observation))
    assert observation["loss"] == comm.size / 2


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_mean_of_variables_is_a_variable(comm: Any, dtype: str) -> None:
    weight = chainer.Parameter(np.array([comm.rank + 0.5, 8], dtype))
    observation = {"loss": weight * 2}
    ObservationAggregator(comm, "loss")(at(1, observation))
    mean: Any = observation["loss"]
    assert isinstance(mean, chainer.Variable)
    assert mean.dtype == dtype
    assert mean.array.tolist() == mean.data.tolist() == [comm.size, 16]
    assert mean.creator_node is None and not mean.requires_grad


@pytest.mark.mpi(1, 3)
def test_mean_of_arrays_is_one_for_each_element(comm: Any) -> None:
    observation: dict[str, Any] = {"loss": np.array([comm.rank, 3], "f")}
    ObservationAggregator(comm, "loss")(at(1, observation))
    np.testing.assert_array_equal(observation["loss"], [(comm.size - 1) / 2, 3])


@pytest.mark.mpi(1, 3)
def test_aggregator_of_variables_keeps_no_graph(comm: Any) -> None:
    def last(observed: list[list[Any]]) -> Any:
        assert all(x.creator_node is None for history in observed for x in history)
        return sum(history[-1] for history in observed) * 10

    aggregator = ObservationAggregator(
        comm, "loss", comm_trigger=(2, "iteration"), aggregator=last
    )
    for iteration in range(1, 3):
        weight = chainer.Parameter(np.array(iteration, "f"))
        observation: dict[str, Any] = {"loss": weight + comm.rank}
        aggregator(at(iteration, observation))
    result = observation["loss"]
    assert result.array == 10 * sum(2 + rank for rank in range(comm.size))
    assert result.creator_node is None


@pytest.mark.mpi(1, 3)
def test_mean_over_an_interval(comm: Any) -> None:
    aggregator = ObservationAggregator(comm, "loss", "mean", comm_trigger=(3, "iteration"))
    for iteration in range(1, 10):
        observation = {"loss": iteration + 10 * comm.rank}
        aggregator(at(iteration, observation))
        if iteration % 3:
            assert "mean" not in observation
        else:
            assert observation["mean"] == iteration - 1 + 10 * (comm.size - 1) / 2


@pytest.mark.mpi(1, 3)
def test_user_defined_aggregator(comm: Any) -> None:
    calls = []

    def aggregate(observed: list[list[Any]]) -> Any:
        calls.append(observed)
        return {"max": max(map(max, observed))}

    aggregator = ObservationAggregator(
        comm, "loss", "all", comm_trigger=(2, "iteration"), aggregator=aggregate
    )
    for iteration in range(1, 3):
        observation = {"loss": iteration + 10 * comm.rank}
        aggregator(at(iteration, observation))
    assert observation["all"] == {"max": 2 + 10 * (comm.size - 1)}
    expected = [[[1 + 10 * rank, 2 + 10 * rank] for rank in range(comm.size)]]
    assert calls == (expected if comm.rank == 0 else [])


@pytest.mark.mpi(1, 3)
def test_value_that_only_some_ranks_observe(comm: Any) -> None:
    aggregator = ObservationAggregator(comm, "loss", "mean")
    observation = {"loss": 3} if comm.rank == comm.size - 1 else {}
    aggregator(at(1, observation))
    assert observation["mean"] == 3
    observation = {}
    aggregator(at(2, observation))
    assert observation == {}


@pytest.mark.mpi(1, 3)
def test_aggregator_that_fails(comm: Any) -> None:
    aggregator = ObservationAggregator(comm, "loss", aggregator=lambda observed: 1 / 0)
    kind = ZeroDivisionError if comm.rank == 0 else RuntimeError
    with pytest.raises(kind, match="division by zero"):
        aggregator(at(1, {"loss": 1}))


def stops_at(trigger: Any, values: list[float], rank: int, key: str, length: int = 2) -> int:
    for iteration, value in enumerate(values, 1):
        # The values are means over the ranks; each rank observes different ones.
        own = np.array(value + (rank - 1) * (-1) ** iteration, "f")
        observation = {key: chainer.Variable(own)}
        if trigger(at(iteration, observation, length)):
            return iteration
    return 0


@pytest.mark.mpi(3)
@pytest.mark.parametrize(
    ("key", "mode", "values", "expected"),
    [
        ("main/loss", "auto", [5, 4, 3, 3, 3, 2], 5),
        ("main/loss", "min", [5, 4, 5, 3, 2, 1], 0),
        ("main/accuracy", "auto", [1, 2, 3, 3, 3, 4], 5),
        ("main/loss", "max", [1, 2, 1, 1, 9, 9], 4),
    ],
)
def test_stops_together(key: str, mode: str, values: list[float], expected: int) -> None:
    comm = chainermn.create_communicator("naive")
    trigger = MultiNodeEarlyStoppingTrigger(
        comm, check_trigger=(1, "iteration"), monitor=key, patience=2, mode=mode
    )
    assert stops_at(trigger, values, comm.rank, key) == expected


@pytest.mark.mpi(1, 3)
def test_max_trigger_and_suffix(comm: Any) -> None:
    trigger = MultiNodeEarlyStoppingTrigger(comm, max_trigger=(4, "iteration"), suffix="/mean")
    assert trigger.get_training_length() == (4, "iteration")
    observation = {"main/loss": 1.0}
    assert trigger(at(1, observation)) is False
    assert observation["main/loss/mean"] == 1.0
    assert trigger(at(4, {"main/loss": 1.0})) is True


@pytest.mark.mpi(3)
def test_ranks_whose_epochs_differ_stop_together(comm: Any) -> None:
    trigger = MultiNodeEarlyStoppingTrigger(comm, patients=1, check_trigger=(1, "epoch"))
    stopped = stops_at(trigger, [1] * 20, 1, "main/loss", length=3 + comm.rank)
    assert stopped == 6


@pytest.mark.mpi(2, 3)
def test_trigger_that_fails_on_rank_0_raises_on_all(comm: Any) -> None:
    trigger = early_stopping(comm)
    trigger.actual_trigger = None  # only rank 0 asks its trigger
    with pytest.raises(TypeError, match="NoneType"):
        trigger(at(1, {"main/loss": 1.0}))
    assert comm.allreduce_obj(1) == comm.size  # nothing is left in flight


def early_stopping(comm: Any) -> MultiNodeEarlyStoppingTrigger:
    return MultiNodeEarlyStoppingTrigger(comm, check_trigger=(2, "iteration"), patience=2)


@pytest.mark.mpi(1, 3)
def test_resumed_trigger_goes_on_counting(comm: Any) -> None:
    before = early_stopping(comm)
    for iteration, loss in enumerate([5, 5, 3, 3, 4, 4, 9], 1):
        assert not before(at(iteration, {"main/loss": loss}))
    # Save in iteration 8 before asking the trigger about it, as Chainer does. The best mean
    # is 3, and there has been one check since.
    saved = chainer.serializers.npz.serialize(before)

    resumed = early_stopping(comm)
    chainer.serializers.NpzDeserializer(saved).load(resumed)
    assert resumed(at(8, {})) is False  # nothing has been observed yet
    assert resumed(at(9, {"main/loss": 4})) is False
    assert resumed(at(10, {"main/loss": 4})) is True


@pytest.mark.mpi(1)
def test_snapshot_without_the_state_of_the_trigger(comm: Any) -> None:
    trigger = early_stopping(comm)
    chainer.serializers.NpzDeserializer({}).load(trigger)
    assert trigger.actual_trigger.count == 0


@pytest.mark.mpi(1, 3)
def test_contradicting_arguments(comm: Any) -> None:
    with pytest.raises(TypeError, match="patients"):
        MultiNodeEarlyStoppingTrigger(comm, patience=1, patients=2)


@pytest.mark.mpi(1, 3)
def test_only_rank_0_prints(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    MultiNodeEarlyStoppingTrigger(comm, verbose=True)
    assert bool(capsys.readouterr().out) == (comm.rank == 0)
