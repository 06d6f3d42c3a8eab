"""The wrapper that puts the gradient exchange between backward and update."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeAlias

import chainer
import numpy as np
from chainer.variable import VariableNode

from chainermn.agreement import check_equal
from chainermn.resuming import N_RANKS

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase
    from chainermn.compression.compression import Compression
    from chainermn.gradients.compressor import Compressor, State

# Key of the part of a snapshot that compression needs.
_COMPRESSION = "compression"

Overlap: TypeAlias = bool | Literal["auto"]


class MultiNodeOptimizer:
    """See `create_multi_node_optimizer`.

    All other attributes are read from and set on ``actual_optimizer``.

    Attributes
    ----------
    actual_optimizer : chainer.Optimizer
    communicator : CommunicatorBase
    zero_fill : bool
    """

    actual_optimizer: chainer.Optimizer
    communicator: CommunicatorBase
    zero_fill: bool
    _overlap: Overlap
    _compressor: Compressor | None
    _restored = False
    #: What compression has left unsent on other ranks, by rank, for a snapshot of all.
    unsent_elsewhere: Mapping[int, State] = {}
    # The target when the replicas were made equal, and its parameters that were initialised then.
    _synchronised: tuple[chainer.Link | None, set[VariableNode]] = (None, set())

    def __init__(
        self,
        actual_optimizer: chainer.Optimizer,
        communicator: CommunicatorBase,
        zero_fill: bool,
        overlap: Overlap = False,
        compressor: Compressor | None = None,
    ) -> None:
        vars(self).update(
            actual_optimizer=actual_optimizer,
            communicator=communicator,
            zero_fill=zero_fill,
            _overlap=overlap,
            _compressor=compressor,
        )

    @property
    def compression(self) -> Compression | None:
        """How gradients are compressed; None if they are not."""
        return None if self._compressor is None else self._compressor.compression

    def setup(self, link: chainer.Link) -> Self:
        """Set the link whose parameters are optimized, and return this optimizer."""
        self.actual_optimizer.setup(link)
        self._synchronised = (None, set())
        if self._compressor is not None:
            self._compressor.forget()
            self._compressor.n_exchanges = 0
        return self

    def update(self, lossfun: Callable[..., Any] | None = None, *args: Any, **kwds: Any) -> None:
        """Average the gradients over the ranks and take a step. Every rank must call it.

        Parameters
        ----------
        lossfun : callable, optional
            Function that returns the loss, given ``args`` and ``kwds``; its backward runs first.
            By default the current gradients are used.

        Raises
        ------
        ValueError
            On every rank, if the ranks have different parameters, or optimizers with different
            settings; without ``zero_fill`` also if they have different gradients.
        """
        if lossfun is not None:
            self._backward(lossfun, *args, **kwds)
        changed, restored = self._has_changed(), self._restored
        self._restored = False
        changed, restored = self._step_unless(changed, restored)
        if not changed and not restored:
            return
        if changed:
            self._agree_on_settings()
        if restored:
            self._after_restoring()
        if changed and not (restored and self._are_replicas_equal()):
            self._synchronise()
            return
        self._note_synchronised()
        self._step_unless()

    def _backward(self, lossfun: Callable[..., Any], *args: Any, **kwds: Any) -> None:
        actual = self.actual_optimizer
        loss = lossfun(*args, **kwds)
        if getattr(actual, "_use_cleargrads", True):
            actual.target.cleargrads()
        else:
            actual.target.zerograds()
        self.backward(loss)

    def backward(self, loss: chainer.Variable) -> None:
        """Run ``loss.backward()``, with the loss scale of this optimizer, before `update()`.

        If the exchange of gradients overlaps with backward, it begins here; after a plain
        ``loss.backward()`` it begins with `update`. To accumulate gradients over several batches,
        use ``loss.backward()`` for all except the last::

            model.cleargrads()
            for batch in batches[:-1]:
                loss(model, batch).backward()
            optimizer.backward(loss(model, batches[-1]))
            optimizer.update()

        From here to `update` the gradients are read-only. Replacing them costs a second exchange.

        Parameters
        ----------
        loss : chainer.Variable
            A loss of one element.
        """
        loss.backward(loss_scale=self.actual_optimizer._loss_scale)

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load the state of ``actual_optimizer``, and what compression has left unsent.

        The number of ranks is saved too, which loading neither needs nor reads.
        """
        self.actual_optimizer.serialize(serializer)
        compressor, target = self._compressor, self.actual_optimizer.target
        if isinstance(serializer, chainer.Deserializer):
            self._restored = True
            if compressor is not None:
                compressor.load(serializer[_COMPRESSION], target)
            return
        serializer(N_RANKS, self.communicator.size)
        if compressor is not None:
            compressor.save(serializer[_COMPRESSION], self.unsent_elsewhere)

    def unsent(self) -> State:
        """Return what compression has left unsent on this rank, by names of parameters."""
        return {} if self._compressor is None else self._compressor.state()

    def _has_changed(self) -> bool:
        """Tell whether the parameters have changed since the replicas were last made equal."""
        target = self.actual_optimizer.target
        link, nodes = self._synchronised
        return link is not target or nodes != _initialised(target)

    def _step_unless(self, *flags: bool) -> Sequence[bool]:
        """Average gradients and take a step, unless a flag is true on any rank; return which."""
        found = self._mean_unless(flags)
        if not any(found):
            self.actual_optimizer.update(None)
        return found

    def _mean_unless(self, flags: Sequence[bool]) -> Sequence[bool]:
        target = self.actual_optimizer.target
        if self._compressor is None:
            # Communicators of users need not know of compression.
            return self.communicator.mean_grad_unless(flags, target, self.zero_fill)
        return self.communicator.mean_grad_unless(flags, target, self.zero_fill, self._compressor)

    def _agree_on_settings(self) -> None:
        """Raise on all ranks unless their optimizers have the same settings."""
        check_equal(self.communicator, self._settings(), "create_multi_node_optimizer")
        if self.compression is not None:
            self._check_arithmetic(self.compression)

    def _check_arithmetic(self, compression: Compression) -> None:
        """Raise on all ranks unless their processors would compute the same means."""
        everywhere = self.communicator.allgather_obj(compression.arithmetic())
        others = [rank for rank, one in enumerate(everywhere) if one != everywhere[0]]
        if others:
            raise ValueError(
                f"{compression}: rank 0 and rank{'s' * (len(others) > 1)} "
                f"{', '.join(map(str, others))} have processors for which BLAS rounds "
                "differently, so the means would differ. Set OPENBLAS_CORETYPE=Haswell on all "
                "hosts, or use another compression, such as chainermn.compression.TopK"
            )

    def _settings(self) -> str:
        settings = f"double_buffering=False, overlap={self._overlap!r}"
        return settings + f", compression={self.compression!r}" * (self._compressor is not None)

    def _after_restoring(self) -> None:
        """Agree on what a snapshot has told, which at least one rank has loaded."""
        compressor = self._compressor
        if compressor is None:
            return
        found = compressor.why_not_loaded, compressor.n_exchanges
        everywhere = self.communicator.allgather_obj(found)
        reasons = [reason for reason, _ in everywhere if reason]
        if reasons or len(set(everywhere)) > 1:
            compressor.forget()
            compressor.n_exchanges = everywhere[0][1]
            if self.communicator.rank == 0:
                reason = next(iter(reasons), "the ranks have loaded different snapshots")
                warnings.warn(
                    f"compression={compressor.compression}: what has not been sent before is "
                    f"lost: {reason}",
                    stacklevel=4,
                )

    def _are_replicas_equal(self) -> bool:
        digests = self.communicator.allgather_obj(_digest(self.actual_optimizer.target))
        return all(digest == digests[0] for digest in digests)

    def _synchronise(self) -> None:
        self.communicator.bcast_data(self.actual_optimizer.target)
        _initialise_states(self.actual_optimizer.target)
        self._note_synchronised()

    def _note_synchronised(self) -> None:
        target = self.actual_optimizer.target
        self._synchronised = (target, _initialised(target))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actual_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.actual_optimizer, name, value)

    def __copy__(self) -> Self:
        return self._around(self.actual_optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._around(copy.deepcopy(self.actual_optimizer, memo))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled, as its communicator belongs to this "
            "process. Pickle its actual_optimizer, or save it with chainer.serializers"
        )

    def _around(self, actual_optimizer: chainer.Optimizer) -> Self:
        """Return a wrapper like this one around a copy of its optimizer."""
        compressor = None if self._compressor is None else self._compressor.copy()
        settings = self.zero_fill, self._overlap, compressor
        twin = type(self)(actual_optimizer, self.communicator, *settings)
        if self._synchronised[0] is not None and not self._has_changed():
            twin._note_synchronised()
        return twin


def _initialise_states(link: chainer.Link) -> None:
    """Initialise the states of update rules, without which Chainer cannot load a snapshot."""
    for parameter in link.params():
        rule = getattr(parameter, "update_rule", None)
        if rule is None or parameter.array is None:
            continue
        if rule._use_fp32_update and parameter.dtype == np.float16:
            continue  # the state is that of a copy in float32
        rule._init_states(parameter)


def _digest(link: chainer.Link) -> bytes:
    digest = hashlib.blake2b()
    for name, parameter in sorted(link.namedparams()):
        array = parameter.array
        digest.update(repr((name, None if array is None else (array.shape, array.dtype))).encode())
        if array is not None:
            digest.update(np.ascontiguousarray(chainer.backends.cuda.to_cpu(array)).tobytes())
    return digest.digest()


def _initialised(link: chainer.Link) -> set[VariableNode]:
    return {parameter.node for parameter in link.params(include_uninit=False)}
