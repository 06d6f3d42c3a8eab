"""The settings of an optimizer that must be the same on all ranks, for equal steps."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np
from chainer.optimizer_hooks import GradientNoise

from chainermn.gradients.parameters import named_parameters

if TYPE_CHECKING:
    from chainer.optimizer import UpdateRule

    from chainermn.communicators.communicator_base import CommunicatorBase

_PLAIN = bool, int, float, str, type(None), np.generic
_KNOWN = *_PLAIN, tuple, *chainer.get_array_types()
# Faster than `attrgetter` on the rules themselves.
_is_enabled = itemgetter("enabled")


class StepSettings:
    """The settings of an optimizer's steps, as one number that ranks compare.

    ``with_loss_scale`` tells whether the loss scale must be the same.

    Attributes
    ----------
    may_draw : bool
        Whether a hook or an update rule may draw random numbers.
    """

    def __init__(self, *, with_loss_scale: bool = True) -> None:
        self.may_draw = False
        self._with_loss_scale = with_loss_scale
        self.forget()

    def forget(self) -> None:
        """Look at everything in the next step."""
        # Mappings that say what the optimizer does, and the values that they had.
        self._seen: Sequence[tuple[Mapping[str, Any], Sequence[Any]]] = ()
        self._updating: Sequence[Mapping[str, Any]] = ()
        self._frozen: Sequence[Mapping[str, Any]] = ()
        self._number = self._number_of_rules = 0
        self._rules_may_draw = False

    def number(self, optimizer: chainer.Optimizer) -> int:
        """Return a number below 2**32, the same on all ranks if the settings are.

        The loss scale is left out: `number_of_scale` has it.
        Takes a few microseconds if nothing was assigned since the last call. What single
        parameters override is only looked at after `forget`, or if one was frozen or thawed.
        """
        are_rules_known = (
            bool(self._seen)
            and all(map(_is_enabled, self._updating))
            and not any(map(_is_enabled, self._frozen))
        )
        if are_rules_known and all(map(_is_as, self._seen)):
            return self._number
        if not are_rules_known:
            self._look_at_rules(_named_rules(optimizer))
        hooks = _hooks(optimizer).values()
        mappings = [*map(vars, filter(_is_known, hooks)), *_hook_mappings(optimizer)]
        if hasattr(optimizer, "hyperparam"):
            mappings.append(vars(optimizer.hyperparam))
        self._seen = [(mapping, list(mapping.values())) for mapping in mappings]
        self.may_draw = self._rules_may_draw or any(map(_may_draw, hooks))
        self._number = _checksum(self._of_optimizer(optimizer), self._number_of_rules)
        return self._number

    def number_of_scale(self, optimizer: chainer.Optimizer) -> int:
        """Return a number below 2**32, the same on all ranks if the loss scale is.

        In a step by a CUDA graph, reading the loss scale would make the host wait for the GPU.
        """
        scale = optimizer._loss_scale if self._with_loss_scale else None
        return 0 if scale is None else zlib.crc32(repr(scale).encode())

    def _look_at_rules(self, rules: Mapping[str, UpdateRule]) -> None:
        known = [vars(rule) for rule in rules.values() if "enabled" in vars(rule)]
        self._updating = [rule for rule in known if rule["enabled"]]
        self._frozen = [rule for rule in known if not rule["enabled"]]
        hooks = [hook for rule in rules.values() for hook in _hooks(rule).values()]
        self._rules_may_draw = any(map(_may_draw, [*rules.values(), *hooks]))
        self._number_of_rules = _checksum(_of_rules(rules), 0)

    def check(self, communicator: CommunicatorBase, optimizer: chainer.Optimizer) -> None:
        """Raise ValueError on all ranks, if any has other settings. Collective."""
        self.forget()
        own = {**self._of_optimizer(optimizer), **_of_rules(_named_rules(optimizer))}
        if self._with_loss_scale:
            own["the loss scale"] = optimizer._loss_scale
        everywhere = communicator.allgather_obj(own)
        for name in sorted({name for one in everywhere for name in one}):
            values = [one.get(name, "none") for one in everywhere]
            if len(set(map(repr, values))) > 1:
                shown = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(
                    f"{name} differs between ranks, so their models would become different: "
                    f"{shown}. Set it to the same on every rank. An extension that changes it, "
                    "such as ExponentialShift, must run on every rank"
                )

    def _of_optimizer(self, optimizer: chainer.Optimizer) -> dict[str, Any]:
        """Return what an optimizer does with all parameters, by names for messages."""
        found = _numbers(_entries(optimizer))
        found["the optimizer"] = type(optimizer).__name__
        return found | _described(_hooks(optimizer), "")


def hyperparameters(optimizer: chainer.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the hyperparameters: the optimizer's under "", a parameter's own under its name."""
    found = {name: _entries(rule) for name, rule in _named_rules(optimizer).items()}
    return {"": _entries(optimizer), **found}


def set_hyperparameters(
    optimizer: chainer.Optimizer, values: Mapping[str, Mapping[str, Any]]
) -> None:
    """Set all hyperparameters to those that `hyperparameters` returned on another rank."""
    for name, owner in {"": optimizer, **_named_rules(optimizer)}.items():
        for key in _entries(owner).keys() - values[name].keys():
            delattr(owner.hyperparam, key)
        for key, value in values[name].items():
            setattr(owner.hyperparam, key, value)


def _of_rules(rules: Mapping[str, UpdateRule]) -> dict[str, Any]:
    """Return what update rules do with single parameters, by names for messages."""
    found: dict[str, Any] = {}
    for parameter, rule in rules.items():
        found[f"the update of parameter {parameter}"] = "on" if rule.enabled else "off"
        for name, value in _numbers(_entries(rule)).items():
            found[f"{name} of parameter {parameter}"] = value
        found |= _described(_hooks(rule), f" of parameter {parameter}")
    return found


def _named_rules(optimizer: chainer.Optimizer) -> dict[str, UpdateRule]:
    pairs = named_parameters(optimizer.target)
    rules = {name: getattr(parameter, "update_rule", None) for name, parameter in pairs}
    return {name: rule for name, rule in rules.items() if rule is not None}


def _entries(owner: Any) -> dict[str, Any]:
    """Return the hyperparameters of an optimizer or update rule, without those of its parent."""
    hyperparam = getattr(owner, "hyperparam", None)
    entries = {} if hyperparam is None else vars(hyperparam)
    return {
        key: value
        for key, value in entries.items()
        if isinstance(value, _KNOWN) and key != "_parent"
    }


def _hooks(owner: Any) -> dict[str, Any]:
    """Return the hooks of an optimizer or update rule."""
    return {name: hook for hooks in _hook_mappings(owner) for name, hook in hooks.items()}


def _hook_mappings(owner: Any) -> list[Mapping[str, Any]]:
    """Return the mappings in which Chainer keeps hooks; it has no public name for them."""
    hookable = getattr(owner, "_hookable", None)
    return [] if hookable is None else [hookable._pre_update_hooks, hookable._post_update_hooks]


def _is_known(hook_or_rule: Any) -> bool:
    """Tell whether attributes that are numbers are settings, and nothing else."""
    return type(hook_or_rule).__module__.startswith(("chainer.", "chainermn."))


def _described(hooks: Mapping[str, Any], of_what: str) -> dict[str, str]:
    """Return the classes and settings of hooks; a user's own may only read."""
    found = {}
    for name, hook in hooks.items():
        if _is_known(hook):
            settings = ", ".join(f"{key}={value!r}" for key, value in _numbers(vars(hook)).items())
            found[f"the hook {name}{of_what}"] = f"{type(hook).__name__}({settings})"
    return found


def _may_draw(hook_or_rule: Any) -> bool:
    return type(hook_or_rule) is GradientNoise or not _is_known(hook_or_rule)


def _is_as(seen: tuple[Mapping[str, Any], Sequence[Any]]) -> bool:
    """Tell whether a mapping still has the same objects."""
    mapping, values = seen
    return len(mapping) == len(values) and all(map(is_, mapping.values(), values))


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are numbers, texts or arrays, so that their `repr` compares them."""
    return {
        key: value.tolist() if hasattr(value, "tolist") else value
        for key, value in values.items()
        if isinstance(value, (*_PLAIN, *chainer.get_array_types()))
        or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value))
    }


def _checksum(settings: Mapping[str, Any], start: int) -> int:
    return zlib.crc32(repr(sorted(settings.items())).encode(), start)
