"""``chainermn doctor``: find what is wrong with an installation, and say what to do about it.

``checks/`` holds the checks, grouped by subject. Anything that may hang or crash runs as a probe
(``probes/``), in a process of its own with a time limit. Only probes import Chainer, MPI or CuPy,
so the doctor works where those fail.
"""
