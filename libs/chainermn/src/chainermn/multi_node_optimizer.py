"""The optimizer, under its module's name in ChainerMN 1.0."""

from chainermn.optimizers import create_multi_node_optimizer

__all__ = ["create_multi_node_optimizer"]
