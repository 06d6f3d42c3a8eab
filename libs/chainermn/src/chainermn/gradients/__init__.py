"""Average gradients: from a model's parameters to the flat arrays of the transports.

Read `exchange` first: its `GradientExchange.mean` contains the whole idea.
"""
