"""Extend trainers that run on several ranks."""

from chainermn.extensions._multi_node_snapshot import MultiNodeSnapshot, multi_node_snapshot
from chainermn.extensions.allreduce_persistent import AllreducePersistent
from chainermn.extensions.checkpoint import MultiNodeCheckpointer, create_multi_node_checkpointer
from chainermn.extensions.distributed_report import DistributedReport
from chainermn.extensions.multi_node_early_stopping_trigger import MultiNodeEarlyStoppingTrigger
from chainermn.extensions.multi_node_evaluator import (
    GenericMultiNodeEvaluator,
    create_multi_node_evaluator,
)
from chainermn.extensions.observation_aggregator import ObservationAggregator
from chainermn.extensions.reports.best_model import BestModel
from chainermn.extensions.reports.run_record import record_run
from chainermn.extensions.reports.tensorboard_report import TensorBoardReport
from chainermn.extensions.reports.terminal_report import TerminalReport
from chainermn.extensions.reports.throughput import Throughput
from chainermn.extensions.step_seed import StepSeed
from chainermn.extensions.stop_on_signal import StopOnSignal
from chainermn.extensions.timeline import Timeline

__all__ = [
    "AllreducePersistent",
    "BestModel",
    "DistributedReport",
    "GenericMultiNodeEvaluator",
    "MultiNodeCheckpointer",
    "MultiNodeEarlyStoppingTrigger",
    "MultiNodeSnapshot",
    "ObservationAggregator",
    "StepSeed",
    "StopOnSignal",
    "TensorBoardReport",
    "TerminalReport",
    "Throughput",
    "Timeline",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "multi_node_snapshot",
    "record_run",
]
