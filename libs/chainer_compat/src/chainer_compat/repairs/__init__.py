"""The repairs, one file per library whose changes they make up for.

Every repair is a function that takes the module to repair; ``chainer_compat.registry`` lists them.
"""
