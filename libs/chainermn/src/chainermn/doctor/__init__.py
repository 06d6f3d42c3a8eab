"""``chainermn doctor``: find what is wrong with an installation, and say what to do about it.

``checks/`` holds the checks, grouped by subject. Anything that may hang or crash is a probe
(``probes.py``), in a process of its own with a time limit. Only probes import Chainer, MPI or
CuPy, so the doctor works where those fail.
"""
