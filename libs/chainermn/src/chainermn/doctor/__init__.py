"""``chainermn doctor``: find what is wrong with an installation, and say how to fix it.

``checks/`` holds the checks, grouped by subject. Anything that may hang or crash is a probe
(``probes.py``), which runs in a separate process with a time limit. Only probes import Chainer,
MPI or CuPy, so the doctor works even where those fail.
"""
