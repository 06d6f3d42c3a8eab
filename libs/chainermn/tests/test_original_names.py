"""Every public name of the ChainerMN in Chainer's wheel is here, and takes what it takes there."""

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

# Inner workings of the original that were importable, with what took their place.
PLUMBING = {
    "chainermn.functions.batch_normalization.MultiNodeBNImplSelector",  # one MPI implementation
    "chainermn.extensions.observation_aggregator.ObservationAggregator.compute_summary",
    "chainermn.communicators._communication_utility",  # communicators/topology.py, transport/
    "chainermn.communicators._memory_utility",  # gradients/
}

# What a method takes here beyond, or instead of, what it took there.
DIFFERENT = {
    # There, other than in the classes that one gets from create_communicator.
    "chainermn.communicators.communicator_base.CommunicatorBase.__init__",
    "chainermn.communicators.communicator_base.CommunicatorBase.allreduce",
    "chainermn.communicators.communicator_base.CommunicatorBase.bcast",
    "chainermn.communicators.communicator_base.CommunicatorBase.gather",
    "chainermn.communicators.communicator_base.CommunicatorBase.recv_obj",
    # Made by send() and recv(), which say what to expect.
    "chainermn.functions.point_to_point_communication.Send.__init__",
    "chainermn.functions.point_to_point_communication.Recv.__init__",
    # Function nodes now: called by chainer through forward and backward of its newer interface.
    *(
        f"chainermn.functions.{name}"
        for name in (
            "collective_communication.AllGather.backward",
            "collective_communication.AllToAll.backward",
            "collective_communication.Bcast.backward",
            "collective_communication.Gather.backward",
            "collective_communication.Scatter.backward",
            "point_to_point_communication.Send.backward",
            "point_to_point_communication.Recv.backward",
            "pseudo_connect.PseudoConnect.backward",
        )
    ),
}


def public_definitions() -> Iterator[tuple[str, str, ast.FunctionDef | None]]:
    """Yield module, dotted name and signature of what the original defines in public."""
    for file in sorted(ORIGINAL.rglob("*.py")):
        parts = file.relative_to(ORIGINAL.parent).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        if module in PLUMBING:
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield module, node.name, node
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                if f"{module}.{node.name}" in PLUMBING:
                    continue
                yield module, node.name, None
                for member in node.body:
                    if isinstance(member, ast.FunctionDef) and (
                        not member.name.startswith("_") or member.name == "__init__"
                    ):
                        name = f"{node.name}.{member.name}"
                        if f"{module}.{name}" not in PLUMBING:
                            yield module, name, member
            elif isinstance(node, ast.ImportFrom) and file.name == "__init__.py":
                for alias in node.names:
                    if (node.module or "").startswith("chainermn"):
                        yield module, alias.name, None


@pytest.mark.parametrize(
    ("module", "name", "signature"),
    [pytest.param(*found, id=f"{found[0]}.{found[1]}") for found in public_definitions()],
)
def test_name(module: str, name: str, signature: ast.FunctionDef | None) -> None:
    if name.startswith("PureNcclCommunicator.") or f"{module}.{name}" in DIFFERENT:
        signature = None
    if name.endswith("._init_comms"):
        return
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if signature is not None and not isinstance(found, property):
        check_signature(inspect.signature(found), signature.args)


def check_signature(here: inspect.Signature, there: ast.arguments) -> None:
    """Fail unless every call that the original allows is allowed here."""
    kinds = inspect.Parameter
    parameters = list(here.parameters.values())
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD,)]
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
