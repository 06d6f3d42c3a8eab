"""The evaluator, under the name of this module in ChainerMN 1.0."""

from chainermn.extensions import create_multi_node_evaluator

__all__ = ["create_multi_node_evaluator"]
