"""The repairs, one file per library whose change they answer.

Every repair is a function of the module it concerns; ``chainer_compat.registry`` says which.
"""
