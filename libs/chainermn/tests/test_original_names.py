"""Every public name of the ChainerMN in Chainer's wheel exists here, with the same arguments."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainer
import pytest

ORIGINAL = Path(chainer.__file__).parents[1] / "chainermn"

# Missing here, or with other arguments. docs/migrating/from_chainermn.md names all of them.
MODULES = {
    "chainermn.communicators._communication_utility",
    "chainermn.communicators._memory_utility",
}
CLASSES = {"chainermn.functions.batch_normalization.MultiNodeBNImplSelector"}
MEMBERS = {
    # In the classes that create_communicator returns, the original has the arguments used here.
    "chainermn.communicators.communicator_base.CommunicatorBase.allreduce",
    "chainermn.communicators.communicator_base.CommunicatorBase.bcast",
    "chainermn.communicators.communicator_base.CommunicatorBase.gather",
    "chainermn.communicators.communicator_base.CommunicatorBase.recv_obj",
    # The original takes keyword arguments that nothing reads.
    "chainermn.communicators.communicator_base.CommunicatorBase.set_config",
    "chainermn.communicators.mpi_communicator_base.MpiCommunicatorBase.set_config",
    "chainermn.communicators.pure_nccl_communicator.PureNcclCommunicator.set_config",
    # Gone: ObservationAggregator takes an aggregator.
    "chainermn.extensions.observation_aggregator.ObservationAggregator.compute_summary",
    # Made by send() and recv(), which add a header that says what to expect.
    "chainermn.functions.point_to_point_communication.Send.__init__",
    "chainermn.functions.point_to_point_communication.Recv.__init__",
    # Function nodes now, which Chainer calls through its newer interface.
    "chainermn.functions.collective_communication.AllGather.backward",
    "chainermn.functions.collective_communication.AllToAll.backward",
    "chainermn.functions.collective_communication.Bcast.backward",
    "chainermn.functions.collective_communication.Gather.backward",
    "chainermn.functions.collective_communication.Scatter.backward",
    "chainermn.functions.point_to_point_communication.Send.backward",
    "chainermn.functions.point_to_point_communication.Recv.backward",
    "chainermn.functions.pseudo_connect.PseudoConnect.backward",
}
EXCEPTIONS = MODULES | CLASSES | MEMBERS

# What the original takes as ``**kwargs``, where it raises for any other keyword.
KEYWORDS = {"create_communicator": {"allreduce_grad_dtype", "batched_copy"}}


def public_definitions() -> Iterator[tuple[str, str, ast.FunctionDef | None]]:
    """Yield the module, dotted name and signature of each public definition of the original.

    A module itself has an empty name.
    """
    for file in sorted(ORIGINAL.rglob("*.py")):
        parts = file.relative_to(ORIGINAL.parent).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        yield module, "", None
        if module in MODULES:
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield module, node.name, node
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield module, node.name, None
                if f"{module}.{node.name}" in CLASSES:
                    continue
                for member in node.body:
                    if isinstance(member, ast.FunctionDef) and (
                        not member.name.startswith("_") or member.name == "__init__"
                    ):
                        yield module, f"{node.name}.{member.name}", member
            elif isinstance(node, ast.ImportFrom) and file.name == "__init__.py":
                for alias in node.names:
                    if (node.module or "").startswith("chainermn"):
                        yield module, alias.name, None


def check(module: str, name: str, signature: ast.FunctionDef | None) -> None:
    """Fail unless a name of the original exists here and takes the same arguments."""
    found: Any = importlib.import_module(module)
    for part in name.split(".") if name else []:
        assert hasattr(found, part), f"{part} is missing"
        found = getattr(found, part)
    if signature is not None and not isinstance(found, property):
        check_signature(inspect.signature(found), signature)


DEFINITIONS = {f"{it[0]}.{it[1]}".rstrip("."): it for it in public_definitions()}


@pytest.mark.parametrize("name", sorted(set(DEFINITIONS) - EXCEPTIONS))
def test_name(name: str) -> None:
    check(*DEFINITIONS[name])


@pytest.mark.parametrize("name", sorted(EXCEPTIONS))
def test_exception_is_one(name: str) -> None:
    with pytest.raises((AssertionError, ModuleNotFoundError)):
        check(*DEFINITIONS[name])


def check_signature(here: inspect.Signature, original: ast.FunctionDef) -> None:
    """Fail unless every call that the original allows is allowed here."""
    kinds = inspect.Parameter
    there = original.args
    parameters = list(here.parameters.values())
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    positional = [
        p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    expected = there.args
    required = len(expected) - len(there.defaults)
    if any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
        expected = expected[:1]
    for index, argument in enumerate(expected):
        assert index < len(positional), f"{argument.arg} cannot be given by position"
        assert positional[index].name == argument.arg
        if index >= required:
            assert positional[index].default is not kinds.empty, f"{argument.arg} is required"
    for parameter in parameters[len(expected) :]:
        if parameter.kind in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL):
            continue
        if parameter.name not in {a.arg for a in there.kwonlyargs}:
            assert parameter.default is not kinds.empty, f"{parameter.name} is a new requirement"
    for argument in there.kwonlyargs:
        assert takes_any or argument.arg in here.parameters, f"{argument.arg} is missing"
    if there.vararg:
        assert any(p.kind is kinds.VAR_POSITIONAL for p in parameters), "takes no more arguments"
    if there.kwarg:
        known = KEYWORDS.get(original.name, {"any other"})
        assert takes_any or known <= here.parameters.keys(), "takes no other keyword arguments"
