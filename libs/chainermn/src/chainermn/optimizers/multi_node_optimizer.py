"""The optimizer that exchanges gradients between backward and update."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeAlias

import chainer

from chainermn import spans
from chainermn.agreement import InputError, check_equal
from chainermn.gradients.parameters import initialized_parameters, named_parameters
from chainermn.gradients.persistents import named_persistents
from chainermn.gradients.step import Step
from chainermn.optimizers import accumulation, pending, replicas
from chainermn.optimizers.accumulated import Accumulated, AccumulatedGradients
from chainermn.optimizers.comparison import Comparison
from chainermn.optimizers.draws import SharedDraws
from chainermn.optimizers.exchanges import exchange_of, library_exchange
from chainermn.optimizers.join import Join
from chainermn.optimizers.parts import digest_of, parameters_of, states_of
from chainermn.optimizers.pending import PendingGradients
from chainermn.optimizers.recorded import Exchange, RecordedSteps
from chainermn.optimizers.replicas import Replicas
from chainermn.optimizers.settings import StepSettings
from chainermn.resuming import N_RANKS, note_ranks

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase
    from chainermn.compression.compression import Compression
    from chainermn.gradients.compressor import Compressor

# Key in snapshots.
_PENDING = "unsent"
_NO_MODEL = InputError(
    RuntimeError, "the optimizer has no model: call optimizer.setup(model) before training"
)

Overlap: TypeAlias = bool | Literal["auto"]


class MultiNodeOptimizer:
    """The optimizer that `create_multi_node_optimizer` returns.

    All other attributes are those of ``actual_optimizer``.

    Attributes
    ----------
    actual_optimizer : chainer.Optimizer
        Optimizer that takes the steps.
    communicator : CommunicatorBase
        Communicator of the ranks that train the model.
    zero_fill : bool
        Whether missing gradients are treated as zeros.

    Examples
    --------
    In your own training loop, call ``update`` with the function that computes the loss:

    >>> x, t = np.ones((4, 2), np.float32), np.zeros(4, np.int32)
    >>> optimizer.update(model, x, t)  # gives all ranks the parameters of rank 0
    >>> optimizer.update(model, x, t)  # averages gradients and takes a step
    >>> optimizer.t
    1
    """

    actual_optimizer: chainer.Optimizer
    communicator: CommunicatorBase
    zero_fill: bool
    #: When replicas are compared; extensions tell it which persistent values are equal.
    comparison: Comparison
    _overlap: Overlap
    _compressor: Compressor | None
    _accumulate: int
    _join: Join | None
    _replicas: Replicas
    _step_settings: StepSettings
    _draws: SharedDraws
    _accumulated: Accumulated
    #: Gradients that other ranks still have to send, by rank, for a snapshot of all ranks.
    pending_elsewhere: Mapping[int, PendingGradients] = {}
    # Number of updates since gradients were averaged.
    _n_updates = 0
    _restored: PendingGradients | None = None
    # Digest of the persistent values before the first forward pass.
    _first_persistents: bytes | None = None

    def __init__(
        self,
        actual_optimizer: chainer.Optimizer,
        communicator: CommunicatorBase,
        zero_fill: bool,
        overlap: Overlap = False,
        compressor: Compressor | None = None,
        accumulate: int = 1,
        uneven: bool = False,
        comparison: Comparison | None = None,
    ) -> None:
        note_ranks(communicator.size)
        vars(self).update(
            actual_optimizer=actual_optimizer,
            communicator=communicator,
            zero_fill=zero_fill,
            comparison=comparison or Comparison(communicator),
            _overlap=overlap,
            _compressor=compressor,
            _accumulate=accumulate,
            _join=Join(communicator) if uneven else None,
            _replicas=Replicas(),
            _step_settings=StepSettings(),
            _draws=SharedDraws(),
            _accumulated=AccumulatedGradients(),
        )

    @property
    def compression(self) -> Compression | None:
        """The compression of gradients; None if they are not compressed."""
        return None if self._compressor is None else self._compressor.compression

    def setup(self, link: chainer.Link) -> Self:
        """Set the model whose parameters are optimized, and return this optimizer."""
        self.actual_optimizer.setup(link)
        self._replicas.forget()
        self._step_settings.forget()
        self._n_updates = 0
        self._accumulated.load(None)
        if self._compressor is not None:
            self._compressor.load(0, {})
        return self

    def update(self, lossfun: Callable[..., Any] | None = None, *args: Any, **kwds: Any) -> None:
        """Average the gradients of all ranks and take a step. Every rank must call it.

        With ``accumulate=k``, every ``k``-th call does this, and `new_epoch`.

        Parameters
        ----------
        lossfun : callable, optional
            Function that returns the loss, called as ``lossfun(*args, **kwds)``; then backward
            runs. By default, the gradients that the parameters already have are used.

        Raises
        ------
        RuntimeError
            On every rank, if `setup` has not been called on any of them.
        ValueError
            On every rank, if the ranks have different parameters or settings, such as another
            learning rate, hook or frozen parameter, or if rank 0 has not loaded a snapshot that
            others have loaded; without ``zero_fill``, also if only some ranks have a gradient.
            With ``accumulate``, if ``lossfun`` is not given.
        """
        are_equal = self._replicas.were_equal(self.actual_optimizer.target)
        if self._graphs is None or lossfun is None or not are_equal:
            self._update(lossfun, *args, **kwds)
        else:
            self._graphs.update(self._recorded_steps(), lossfun, args, kwds)

    def _update(self, lossfun: Callable[..., Any] | None, *args: Any, **kwds: Any) -> None:
        accumulation.check_loss_is_given(lossfun, self._accumulate)
        if self.actual_optimizer.target is None:
            self._average(Step(has_new_parameters=True))  # lets all ranks compare their settings
            self._agree_on_settings()
        self._accumulated.take_over(self.actual_optimizer)
        if lossfun is not None:
            self._compute_gradients(lossfun, args, kwds, self.actual_optimizer._loss_scale)
        self._n_updates += 1
        is_first = not self._replicas.were_equal(self.actual_optimizer.target)
        if self._n_updates >= self._accumulate or is_first:
            self._step()

    def new_epoch(self, auto: bool = False) -> None:
        """Finish an epoch. Updaters call this; every rank must call it.

        With ``accumulate``, take a step on the mean of the batches since the last step. With
        ``uneven``, join the steps of the ranks that still have batches.
        """
        self._step_settings.forget()
        if self._accumulate > 1 and self._replicas.were_equal(self.actual_optimizer.target):
            self._step(ends_epoch=True)
        if self._join is not None:
            self._join.finish()
            while self._join.has_joined:
                self.actual_optimizer.target.cleargrads()
                self._n_updates = 1
                self._step()
        self.actual_optimizer.new_epoch(auto)
        self.comparison.end_epoch(self.actual_optimizer.epoch)

    # ---- one step ----

    def _compute_gradients(
        self, lossfun: Callable[..., Any], args: Sequence[Any], kwds: Any, loss_scale: Any
    ) -> chainer.Variable:
        """Run forward and backward, and return the loss."""
        actual = self.actual_optimizer
        if not self._replicas.were_equal(actual.target):
            self._first_persistents = digest_of(dict(named_persistents(actual.target)))
        with spans.span("forward"):
            loss = lossfun(*args, **kwds)
        if self._n_updates == 0 or self._accumulate == 1:
            if getattr(actual, "_use_cleargrads", True):
                actual.target.cleargrads()
            else:
                actual.target.zerograds()
        with spans.span("backward"):
            if self._accumulate > 1:
                accumulation.divide(loss, loss_scale, self._accumulate)
            if self._n_updates >= self._accumulate - 1:
                self._backward(loss, loss_scale)
            else:
                loss.backward(loss_scale=loss_scale)
        return loss

    def _step(self, *, ends_epoch: bool = False) -> None:
        """Average the gradients of all ranks, and take the same step on each. Collective.

        In the same collective that compares the models, each rank says whether something has to
        be settled before.
        """
        n_updates, restored = self._n_updates, self._restored
        self._n_updates, self._restored = 0, None
        self._complete_loss_scales(self.actual_optimizer._loss_scale)
        step = self._state(restored)._replace(
            is_incomplete=n_updates < self._accumulate,
            ends_epoch=ends_epoch,
            has_finished=self._join is not None and self._join.is_news,
            compares=self.comparison.is_due,
        )
        agreed = self._average(step)
        if agreed.pauses:
            if not self._resolve(agreed, n_updates, restored):
                return
            self._average(Step())
        self._take_step()

    def _state(self, restored: PendingGradients | None, *, reads_loss_scale: bool = True) -> Step:
        """Return what this rank tells the others about its replica before each exchange."""
        target, settings = self.actual_optimizer.target, self._step_settings
        number = settings.number(self.actual_optimizer)
        if reads_loss_scale:
            number ^= settings.number_of_scale(self.actual_optimizer)
        return Step(
            is_first=not self._replicas.were_equal(target),
            has_new_parameters=self._replicas.has_other_parameters(target),
            is_restored=restored is not None,
            settings=number ^ self._draws.checksum() if settings.may_draw else number,
        )

    def _average(self, step: Step) -> Step:
        """Average gradients, unless the step pauses on any rank; return what any rank says."""
        exchange, target = exchange_of(self.communicator), self.actual_optimizer.target
        return exchange.mean(target, self.zero_fill, step, self._compressor)

    @spans.spanned("optimizer")
    def _take_step(self) -> None:
        if self._join is not None:
            self._join.weigh(self._parameters())
        with self._draws.drawing() if self._step_settings.may_draw else nullcontext():
            self.actual_optimizer.update(None)

    def _parameters(self) -> Collection[chainer.Parameter]:
        """Return the initialized parameters."""
        return initialized_parameters(self.actual_optimizer.target).values()

    # ---- what comes before a step now and then ----

    def _resolve(self, step: Step, n_updates: int, restored: PendingGradients | None) -> bool:
        """Do what has to be done before the step, and tell whether it follows. Collective."""
        is_incomplete, ends_epoch = step.is_incomplete, step.ends_epoch
        if step.has_new_parameters:
            self._agree_on_settings()
        if step.is_restored and not self._after_restoring(restored) and self._accumulate > 1:
            self.actual_optimizer.target.cleargrads()
            n_updates, is_incomplete, ends_epoch = 0, True, False
        if self._make_equal(step, restored):
            return False
        if step.compares:
            self.compare_replicas()
        if ends_epoch:
            problem = "an epoch ends with different numbers of batches to average"
            where = f"accumulate={self._accumulate}"
            accumulation.check_equal_counts(self.communicator, n_updates, f"{where}: {problem}")
            accumulation.weigh(self._parameters(), self._accumulate, n_updates)
            return n_updates > 0
        if is_incomplete:
            self._n_updates = n_updates
            return False
        if step.has_finished and self._join is not None:
            return not self._join.agree()
        return True

    def _complete_loss_scales(self, scale: Any) -> None:
        """Give parameters without a gradient the loss scale that other ranks may have for it."""
        if scale is None:
            return
        parameters = self._parameters()
        scales = [p._loss_scale for p in parameters if p.grad is not None]
        for parameter in parameters:
            if parameter.grad is None:
                parameter._loss_scale = scales[0] if scales else scale

    def backward(self, loss: chainer.Variable) -> None:
        """Run ``loss.backward()`` with the loss scale of this optimizer; call `update()` next.

        Use it in your own training loop, for ``overlap``: the exchange of gradients then starts
        during backward. After a plain ``loss.backward()`` it starts in `update`. To accumulate
        gradients over several batches, use ``loss.backward()`` for all except the last::

            model.cleargrads()
            for batch in batches[:-1]:
                loss(model, batch).backward()
            optimizer.backward(loss(model, batches[-1]))
            optimizer.update()

        Do not change the gradients between this call and `update`. Replacing them costs a second
        exchange.

        Parameters
        ----------
        loss : chainer.Variable
            Loss with one element.
        """
        self._backward(loss, self.actual_optimizer._loss_scale)

    def _backward(self, loss: chainer.Variable, loss_scale: Any) -> None:
        loss.backward(loss_scale=loss_scale)

    # ---- steps as CUDA graphs ----

    @property
    def _graphs(self) -> Any:
        """What records and launches the steps of the actual optimizer; None by default."""
        return getattr(self.actual_optimizer, "cuda_graphs", None)

    def _recorded_steps(self) -> RecordedSteps:
        """Return the next step, for what records and launches CUDA graphs."""
        # To read one that the GPU changes, the host would have to wait.
        is_dynamic = self.actual_optimizer._loss_scaling_is_dynamic
        state = self._state(self._restored, reads_loss_scale=not is_dynamic)
        return RecordedSteps(
            self.actual_optimizer,
            self.communicator,
            exchange=self._exchange_of_recorded_steps(),
            state=state._replace(compares=self.comparison.is_due),
            compute=self._compute_all_gradients,
            eager=self._update,
        )

    def _exchange_of_recorded_steps(self) -> Exchange | str:
        """Return the exchange for CUDA graphs, or why there is none; equal on all ranks."""
        exchange, name = library_exchange(self.communicator), type(self.communicator).__name__
        if exchange is None:
            return f"{name} averages gradients in its own way"
        waits = exchange.waits_for_gpu(self.actual_optimizer.target)
        reasons = {
            f"accumulate={self._accumulate}": self._accumulate > 1,
            "uneven=True": self._join is not None,
            f"compression={self.compression!r}": self._compressor is not None,
            "zero_fill=False": not self.zero_fill,
            f"on these hosts, {name} sends gradients of this model through host memory": waits,
        }
        return next((reason for reason, holds in reasons.items() if holds), exchange)

    def _compute_all_gradients(
        self, lossfun: Callable[..., Any], args: Sequence[Any], kwds: Any, loss_scale: Any
    ) -> None:
        """Run forward and backward for a step without anything to settle."""
        loss = self._compute_gradients(lossfun, args, kwds, loss_scale)
        loss.unchain_backward()  # its memory is that of the graph, even if a script keeps the loss
        self._complete_loss_scales(loss_scale)

    # ---- snapshots and comparisons ----

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load the state of ``actual_optimizer``, and gradients that are still pending.

        The number of ranks is saved too, but loading does not read it.
        """
        self.actual_optimizer.serialize(serializer)
        comm = self.communicator
        if not isinstance(serializer, chainer.Deserializer):
            serializer(N_RANKS, comm.size)
            if self.has_pending:
                of_ranks = {comm.rank: self.pending(), **self.pending_elsewhere}
                pending.save(serializer[_PENDING], comm.size, of_ranks)
            return
        names = [name for name, _ in named_parameters(self.actual_optimizer.target)]
        keys = self._accumulated.keys if self.has_pending else ()
        if self._compressor is not None:
            keys += self._compressor.keys
        restored = self._restored = pending.load(
            serializer[_PENDING],
            comm.size,
            comm.rank,
            names=names,
            keys=keys,
            is_compressed=self._compressor is not None,
        )
        self._n_updates = restored.n_updates
        self._accumulated.load(restored.arrays if restored.n_updates else None)
        if self._compressor is not None:
            self._compressor.load(restored.n_exchanges, restored.arrays)

    @property
    def has_pending(self) -> bool:
        """Whether the settings may leave something to send later."""
        return self._compressor is not None or self._accumulate > 1

    def pending(self) -> PendingGradients:
        """Return the gradients that this rank still has to send."""
        compressor = self._compressor
        arrays: dict[str, dict[str, Any]] = {}
        if compressor is not None:
            arrays = {name: dict(of_name) for name, of_name in compressor.state().items()}
        if self._n_updates:
            for name, of_name in self._accumulated.state(self.actual_optimizer).items():
                arrays.setdefault(name, {}).update(of_name)
        n_exchanges = 0 if compressor is None else compressor.n_exchanges
        return PendingGradients(n_exchanges, self._n_updates, arrays)

    def settle(self) -> None:
        """Make parameters equal on all ranks, for an evaluation or a snapshot. Collective."""

    def compare_replicas(self, iteration: int | None = None) -> None:
        """Compare the replicas of all ranks now, bit for bit. Every rank must call it.

        This compares parameters, the states of the update rules, and persistent values that
        `AllreducePersistent` has just averaged. Local SGD compares them after an average only.
        Nothing is compared before the first ``update``, which makes replicas equal, nor if the
        settings ``compare_every`` or ``on_difference`` turn comparisons off.

        Parameters
        ----------
        iteration : int, optional
            Iteration of the trainer; in each, replicas are compared once. By default, they are
            compared in every call.

        Raises
        ------
        ValueError
            On every rank, if replicas differ by more than rounding; with
            ``on_difference="warn"``, rank 0 warns instead.
        """
        # Before the first update, ranks have not agreed on their settings.
        if self.comparison.is_on and self._replicas.were_equal(self.actual_optimizer.target):
            self.comparison.compare(self._equal_parts(), self.actual_optimizer.t, iteration)

    def _equal_parts(self) -> dict[str, Any] | None:
        """Return what must be equal on all ranks; None if the next step makes replicas equal."""
        target = self.actual_optimizer.target
        if self._restored is not None or self._replicas.has_other_parameters(target):
            return None
        return parameters_of(target) | self._equal_states()

    def _equal_states(self) -> dict[str, Any]:
        found = states_of(self.actual_optimizer)
        found.pop("epoch", None)  # ranks may end epochs in different iterations
        return found

    def _agree_on_settings(self) -> None:
        """Raise on all ranks unless their optimizers have the same settings."""
        settings = _NO_MODEL if self.actual_optimizer.target is None else self._settings()
        check_equal(self.communicator, settings, "create_multi_node_optimizer")
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
        return settings + self._further_settings()

    def _further_settings(self) -> str:
        settings = f", compression={self.compression!r}" * (self._compressor is not None)
        settings += f", accumulate={self._accumulate}" * (self._accumulate > 1)
        settings += ", uneven=True" * (self._join is not None)
        settings += ", cuda_graphs=True" * (self._graphs is not None)
        return settings + self.comparison.settings

    def _after_restoring(self, restored: PendingGradients | None) -> bool:
        """Agree on how to continue after at least one rank has loaded a snapshot.

        Returns whether all ranks continue with their pending gradients. Otherwise they drop these.
        """
        if restored is None:
            reason = "a rank has loaded no snapshot" if self.has_pending else ""
            restored, holds_some = PendingGradients(reason=reason), False
        else:
            holds_some = bool(restored.reason or restored.n_updates or restored.arrays)
        own = restored.reason, restored.n_exchanges, restored.n_updates
        everywhere = self.communicator.allgather_obj((own, holds_some))
        reasons = [reason for (reason, *_), _ in everywhere if reason]
        if not reasons and (not self.has_pending or len({state for state, _ in everywhere}) == 1):
            return True
        self._forget(everywhere[0][0][1])
        if self.communicator.rank == 0 and any(some for _, some in everywhere):
            reason = next(iter(reasons), "the ranks have loaded different snapshots")
            warnings.warn(
                f"what was still to be sent when the snapshot was written is lost: {reason}",
                stacklevel=5,
            )
        return False

    def _forget(self, n_exchanges: int) -> None:
        """Drop pending gradients, because they do not fit those of other ranks."""
        if self._compressor is not None:
            self._compressor.load(n_exchanges, {})

    def _make_equal(self, step: Step, restored: PendingGradients | None) -> bool:
        """Give all ranks the replica of rank 0, if necessary, and tell whether it was. Collective.

        It is, unless all have loaded a snapshot with the same parameters: then each keeps what it
        alone has loaded, such as running statistics.
        """
        actual, comm = self.actual_optimizer, self.communicator
        was_restored = step.is_restored and self._is_restored_everywhere(restored)
        are_equal = (
            was_restored and len(set(comm.allgather_obj(digest_of(self._parts_to_resume())))) == 1
        )
        follows = (step.has_new_parameters or step.is_restored) and not are_equal
        everything = step.is_first or (follows and step.is_restored)
        if follows:
            self._synchronize(everything)
        if step.has_new_parameters:
            self._replicas.note_equal(actual.target)
            self._step_settings.forget()
            self._first_persistents = None
        if everything:
            self.comparison.note_equal(actual.t)
        if everything and step.settings:
            replicas.follow_settings(comm, actual)
        if step.settings:
            self._step_settings.check(comm, actual)
        if step.is_first or step.settings:
            # Later, the settings are the same, so the generators are not.
            self._draws.agree(comm, actual.target.device, share_all=not step.is_first)
        return follows

    def _is_restored_everywhere(self, restored: PendingGradients | None) -> bool:
        """Tell whether every rank has loaded a snapshot; raise if any has, but not rank 0."""
        everywhere = self.communicator.allgather_obj(restored is not None)
        if not everywhere[0]:
            ranks = [rank for rank, has_loaded in enumerate(everywhere) if has_loaded]
            raise ValueError(
                f"rank {ranks[0]} has loaded a snapshot, but rank 0 has not. Load it on every "
                "rank; or only on rank 0, and the first update gives all others the same"
            )
        return all(everywhere)

    def _parts_to_resume(self) -> dict[str, Any]:
        """Return what must be the same on all ranks after each has loaded a snapshot."""
        actual = self.actual_optimizer
        return {"t": actual.t, **parameters_of(actual.target)}

    def _synchronize(self, everything: bool) -> None:
        """Give all ranks the parameters of rank 0, or everything. Collective.

        Subclasses drop gradients of the replicas before.
        """
        if everything:
            replicas.follow_rank_0(
                self.communicator, self.actual_optimizer, self._first_persistents
            )
        else:
            replicas.follow_parameters(self.communicator, self.actual_optimizer.target)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.actual_optimizer, name)
        if name == "target" and value is None:
            # Of this type, so that hasattr and getattr can ask.
            raise AttributeError(f"rank {self.communicator.rank}: {_NO_MODEL.message}")
        return value

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
            f"{type(self).__name__} cannot be pickled, because its communicator belongs to this "
            "process. Pickle its actual_optimizer, or save it with chainer.serializers"
        )

    def _twin(self, actual_optimizer: chainer.Optimizer, compressor: Compressor | None) -> Self:
        return type(self)(
            actual_optimizer,
            self.communicator,
            self.zero_fill,
            overlap=self._overlap,
            compressor=compressor,
            accumulate=self._accumulate,
            uneven=self._join is not None,
        )

    def _around(self, actual_optimizer: chainer.Optimizer) -> Self:
        """Return a wrapper like this one around a copy of its optimizer."""
        compressor = None if self._compressor is None else self._compressor.copy()
        twin = self._twin(actual_optimizer, compressor)
        twin.comparison = self.comparison.with_same_settings()
        # Accumulated gradients and local steps are not copied: with them, the copy starts over.
        is_settled = self._n_updates == 0
        if is_settled and not self._replicas.has_other_parameters(self.actual_optimizer.target):
            twin._replicas.note_equal(actual_optimizer.target)
            vars(twin).update(_draws=copy.copy(self._draws))
        return twin
