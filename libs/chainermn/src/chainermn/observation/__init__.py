"""Spans of what Chainer does, and whole jobs whose ranks are recorded."""
