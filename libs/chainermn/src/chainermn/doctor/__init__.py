"""``chainermn doctor``: what is wrong with an installation, and what to do about it.

``checks/`` holds the checks, grouped by subject. What may hang or crash is done by a process of
its own, a probe in ``probes/``, with a time limit. Nothing here imports Chainer, MPI or CuPy but
the probes, so that the doctor can speak where those fail.
"""
