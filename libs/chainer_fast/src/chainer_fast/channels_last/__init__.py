"""Images whose channels lie side by side in memory, as tensor cores need them.

Shapes stay those of Chainer, so that programs see no difference: only strides change.
"""
