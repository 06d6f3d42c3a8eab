"""Make spans of Chainer's work, and record whole jobs."""
