"""Averages of gradients: from the parameters of a model to the flat arrays that transports carry.

Read `exchange` first: its `GradientExchange.mean` is the whole idea.
"""
