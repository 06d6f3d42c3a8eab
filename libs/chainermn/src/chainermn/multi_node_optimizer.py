"""The optimizer; ChainerMN 1.0 has this module."""

from chainermn.optimizers import create_multi_node_optimizer

__all__ = ["create_multi_node_optimizer"]
