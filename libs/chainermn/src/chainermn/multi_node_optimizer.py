"""The optimizer, under the name of this module in ChainerMN 1.0."""

from chainermn.optimizers import create_multi_node_optimizer

__all__ = ["create_multi_node_optimizer"]
