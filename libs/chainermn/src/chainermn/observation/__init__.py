"""Spans of what Chainer does, and whole jobs whose ranks are recorded."""

from chainermn.observation.timeline_file import record_timeline

__all__ = ["record_timeline"]
