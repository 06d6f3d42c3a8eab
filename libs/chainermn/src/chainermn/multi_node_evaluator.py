"""The evaluator; ChainerMN 1.0 has this module."""

from chainermn.extensions import create_multi_node_evaluator

__all__ = ["create_multi_node_evaluator"]
