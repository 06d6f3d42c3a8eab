"""The version of chainermn, which is also that of chainer-compat and chainer-fast."""

VERSION = "8.0.0"
