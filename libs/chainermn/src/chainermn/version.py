"""The version of chainermn, which is also that of chainer-compat."""

VERSION = "8.0.0"
