"""The repairs, in one file per library whose changes they answer.

Every repair is a function that takes the module to repair; ``chainer_compat.registry`` lists them.
"""
