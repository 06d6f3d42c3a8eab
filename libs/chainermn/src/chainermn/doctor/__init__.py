"""``chainermn doctor``: what is wrong with an installation, and what to do about it.

``checks/`` holds the checks, grouped by subject. Whatever may hang or crash runs in a process of
its own, a probe in ``probes/``, with a time limit. Only probes import Chainer, MPI or CuPy, so
that the doctor works where those fail.
"""
