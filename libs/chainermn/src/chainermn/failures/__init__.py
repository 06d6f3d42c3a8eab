"""Watch all ranks, so that a job with a failed rank ends with a message instead of hanging."""

from chainermn.failures.activity import creating, name_callers_by
from chainermn.failures.ending import end_job
from chainermn.failures.start_up import starting
from chainermn.failures.watch import INTERRUPTED, at_end, join, say_failing, stop_watching

__all__ = [
    "INTERRUPTED",
    "at_end",
    "creating",
    "end_job",
    "join",
    "name_callers_by",
    "say_failing",
    "starting",
    "stop_watching",
]
