"""Send exceptions from a rank to the caller."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from typing import NamedTuple

from chainermn.launch.pickles import dumps


class Failure(NamedTuple):
    """Describes how a call failed on a rank."""

    #: Type and message of the exception.
    text: str
    traceback: str
    #: The exception and its arguments; None if they cannot be pickled.
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException, *, hidden_frames: int = 0) -> Failure:
        """Describe an exception, without its outermost frames."""
        trace = error.__traceback__
        for _ in range(hidden_frames):
            trace = trace and trace.tb_next
        text = "".join(traceback.format_exception_only(error)).rstrip()
        lines = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        try:
            return cls(text, lines, dumps((error, error.args)))
        except Exception:
            return cls(text, lines, None)

    def as_exception(self, rank: int) -> BaseException:
        """Return the exception, or a RuntimeError with its text; a note names the rank."""
        error = None
        if self.pickled is not None:
            # Its class may not exist here, or may take other arguments than it stores.
            with contextlib.suppress(BaseException):
                unpickled, args = pickle.loads(self.pickled)  # noqa: S301  # of a rank of ours
                if unpickled.args == args:  # some classes would wrap the message again
                    error = unpickled
        if not isinstance(error, BaseException):
            error = RuntimeError(self.text)
        frames = f":\n{self.traceback}" if self.traceback != self.text else ""
        error.add_note(f"Raised on rank {rank}{frames}")
        return error
