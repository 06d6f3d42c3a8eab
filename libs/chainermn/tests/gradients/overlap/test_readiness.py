"""Hooks tell when a gradient is final, and change nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from chainermn.gradients.overlap.readiness import find_uses, gradient_hooks

Loss = Callable[[chainer.Link], chainer.Variable]


class Network(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        np.random.seed(0)
        with self.init_scope():
            self.a = L.Linear(3, 4)
            self.b = L.Linear(4, 4)
            self.c = L.Linear(4, 2)
            self.scale = chainer.Parameter(np.ones((1, 1), np.float32))
            self.idle = chainer.Parameter(np.ones(2, np.float32))


def x() -> np.ndarray:
    return np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


def straight(net: Any) -> chainer.Variable:
    return F.sum(net.c(F.tanh(net.b(F.tanh(net.a(x()))))) ** 2)


def shared(net: Any) -> chainer.Variable:
    h = F.tanh(net.a(x()))
    for _ in range(3):
        h = F.tanh(net.b(h))
    return F.sum(net.c(h) * net.c(h + 1))


def early_and_late(net: Any) -> chainer.Variable:
    return F.sum(straight(net) * F.sum(net.a.W) + F.sum(net.c.W * net.c.W))


def aliasing(net: Any) -> chainer.Variable:
    return F.sum((net.a.W + F.transpose(F.transpose(net.a.W))) * 2 + F.sum(net.scale))


def broadcast(net: Any) -> chainer.Variable:
    return F.sum(F.broadcast_to(net.scale, (3, 5))) + straight(net)


def gradient_penalty(net: Any) -> chainer.Variable:
    inputs = chainer.Variable(x())
    y = F.sum(net.b(F.tanh(net.a(inputs))) ** 2)
    (gx,) = chainer.grad([y], [inputs], enable_double_backprop=True)
    return y + F.sum(gx**2)


LOSSES = [straight, shared, early_and_late, aliasing, broadcast, gradient_penalty]


def gradients(net: chainer.Link) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in net.namedparams()}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, gradient in one.items():
        assert (gradient is None) == (other[name] is None), name
        if gradient is not None:
            assert gradient.dtype == other[name].dtype
            np.testing.assert_array_equal(gradient, other[name], err_msg=name)


def backward_with_hooks(loss: chainer.Variable, net: chainer.Link, **kwds: Any) -> list[str]:
    names = {parameter.node: name for name, parameter in net.namedparams()}
    order: list[str] = []

    def note(parameter: chainer.Parameter) -> None:
        finals[names[parameter.node]] = parameter.grad
        order.append(names[parameter.node])

    finals: dict[str, Any] = {}
    parameters = list(net.params())
    uses = find_uses(loss, parameters)
    assert uses is not None
    with gradient_hooks(parameters, uses, kwds.get("loss_scale"), note):
        loss.backward(**kwds)
    for name, gradient in finals.items():
        assert gradients(net)[name] is gradient  # it was final
    return order


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_gradients_are_the_same_bit_by_bit(loss: Loss, times: int, scale: float | None) -> None:
    plain, hooked = Network(), Network()
    for net in (plain, hooked):
        net.cleargrads()
    for _ in range(times):  # the gradients of several passes add up
        loss(plain).backward(loss_scale=scale)
        backward_with_hooks(loss(hooked), hooked, loss_scale=scale)
        assert_same(gradients(hooked), gradients(plain))
    for one, other in zip(hooked.params(), plain.params(), strict=True):
        assert one._loss_scale == other._loss_scale
        assert one.node.rank == 0
        assert one.creator is None


@pytest.mark.parametrize("loss", LOSSES)
def test_each_parameter_in_the_graph_once(loss: Loss) -> None:
    net = Network()
    net.cleargrads()
    order = backward_with_hooks(loss(net), net)
    assert len(order) == len(set(order))
    assert set(order) == {
        name for name, gradient in gradients(net).items() if gradient is not None
    }


def test_the_last_layer_comes_first() -> None:
    net = Network()
    net.cleargrads()
    order = backward_with_hooks(straight(net), net)
    assert [name[1] for name in order] == ["c", "c", "b", "b", "a", "a"]
    net.cleargrads()
    order = backward_with_hooks(early_and_late(net), net)
    assert order[-1][1] == "a"


def test_final_while_backward_goes_on() -> None:
    net = Network()
    seen: list[list[str]] = []
    order: list[str] = []

    class Probe(chainer.FunctionNode):
        def forward(self, inputs: Any) -> Any:
            return inputs

        def backward(self, indexes: Any, grad_outputs: Any) -> Any:
            seen.append(list(order))
            return grad_outputs

    h = F.tanh(net.a(x()))
    (h,) = Probe().apply((h,))
    loss = F.sum(net.c(h))
    parameters = [net.a.W, net.c.W]
    net.cleargrads()
    uses = find_uses(loss, parameters)
    assert uses is not None

    def note(parameter: chainer.Parameter) -> None:
        order.append("a" if parameter is net.a.W else "c")

    with gradient_hooks(parameters, uses, None, note):
        loss.backward()
    assert seen == [["c"]]
    assert order == ["c", "a"]


def test_only_the_given_parameters_are_hooked() -> None:
    net = Network()
    net.cleargrads()
    loss = straight(net)
    uses = find_uses(loss, [net.b.W, net.idle])
    assert uses is not None
    assert set(uses) == {net.b.W.node}
    order = []
    with gradient_hooks([net.b.W, net.idle], uses, None, order.append):
        loss.backward()
    assert len(order) == 1
    assert order[0] is net.b.W


def test_recomputation_cannot_be_looked_into() -> None:
    net = Network()
    loss = F.sum(net.c(F.forget(lambda v: F.tanh(net.a(v)), chainer.Variable(x()))))
    assert find_uses(loss, list(net.params())) is None


def test_unchained_graphs_and_constants() -> None:
    net = Network()
    h = F.tanh(net.a(x()))
    h.unchain_backward()
    with chainer.no_backprop_mode():
        idle = net.b(h)
    loss = F.sum(net.c(h) + net.c(idle))
    uses = find_uses(loss, list(net.params()))
    assert uses is not None
    assert set(uses) == {net.c.W.node, net.c.b.node}
    assert uses[net.c.W.node].times == 2
    assert find_uses(chainer.Variable(np.zeros((), np.float32)), list(net.params())) == {}


def test_the_graph_is_freed_as_before() -> None:
    net = Network()
    gc.collect()
    gc.disable()
    try:
        loss = shared(net)
        functions = []
        node = loss.creator_node
        while node is not None:
            functions.append(weakref.ref(node))
            node = next((v.creator_node for v in node.inputs if v.creator_node), None)
        del node
        net.cleargrads()
        backward_with_hooks(loss, net)
        del loss
        assert all(function() is None for function in functions)
    finally:
        gc.enable()


def test_hooks_are_removed_when_backward_fails() -> None:
    class Failing(chainer.FunctionNode):
        def forward(self, inputs: Any) -> Any:
            return inputs

        def backward(self, indexes: Any, grad_outputs: Any) -> Any:
            raise ZeroDivisionError

    net = Network()
    net.cleargrads()
    (h,) = Failing().apply((F.tanh(net.a(x())),))
    with pytest.raises(ZeroDivisionError):
        backward_with_hooks(F.sum(net.c(h)), net)
    assert all(parameter.creator is None for parameter in net.params())
    plain = Network()
    for network in (plain, net):
        network.cleargrads()
        straight(network).backward()
    assert_same(gradients(net), gradients(plain))


def test_with_function_hooks_and_debug_mode() -> None:
    net = Network()
    net.cleargrads()
    timer = chainer.function_hooks.TimerHook()
    with chainer.using_config("debug", True), timer:
        order = backward_with_hooks(shared(net), net)
    assert len(order) == 6
    plain = Network()
    plain.cleargrads()
    shared(plain).backward()
    assert_same(gradients(net), gradients(plain))
