"""The evaluator, under its module's name in ChainerMN 1.0."""

from chainermn.extensions import create_multi_node_evaluator

__all__ = ["create_multi_node_evaluator"]
