"""Sum up how all ranks spend their time, which rank the others wait for, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chainermn.profiling.timeline.clocks import Clock
from chainermn.profiling.timeline.iterations import KINDS, Iteration
from chainermn.profiling.timeline.waiting import Call, waits

#: Parts of a `Summary`: the `KINDS`, and the waits for other ranks, which do not count as a kind.
PARTS = (*KINDS[:4], "waiting", *KINDS[4:])

# Smaller shares of an iteration are not worth mentioning.
_LATE = 0.05
# A straggler causes this many times its share of the waiting.
_MORE_THAN_OTHERS = 1.5
_WAITS_FOR_DATA = 0.1
_MUCH = {"data": 0.15, "layers": 0.15, "exchange": 0.2, "waiting": 0.2, "evaluation": 0.25}
_MUCH |= {"checkpoint": 0.1, "extensions": 0.2, "other": 0.2}

# What takes much time, and what to do about it.
_ADVICE = {
    "layers": "exchanges inside layers, such as those of multi-node batch normalization: larger "
    "batches per rank reduce it",
    "exchange": "the exchange of gradients: larger batches per rank or accumulate=k reduce it",
    "evaluation": "evaluation: evaluate less often, with another trigger",
    "checkpoint": "checkpoints: write checkpoints less often, with another trigger",
    "extensions": "extensions: some take long or run in every iteration; give them another "
    "trigger",
    "other": "work outside the steps: look for your own code between the steps",
}
_ADVICE_BETWEEN_HOSTS = {
    "exchange": "the exchange of gradients: try overlap=True, fewer bits (allreduce_grad_dtype), "
    "compression or accumulate=k"
}


@dataclass(frozen=True)
class RankSummary:
    """Summary of the iterations of one rank, an item of `Summary.ranks`.

    Attributes
    ----------
    seconds : dict
        Mean seconds per iteration of each part, such as ``'data'`` or ``'compute'``.
    share_with_slow_data : float
        Fraction of the iterations that spend at least a tenth of their time on the batch.
    delay : float
        Mean seconds per iteration that the other ranks, on average, wait for this rank.
    extensions : dict
        Mean seconds per iteration of each extension by name, the slowest first.

    Examples
    --------
    >>> report = chainermn.extensions.DistributedReport(comm, filename=None)
    >>> trainer.extend(report)
    >>> trainer.run()
    >>> if comm.rank == 0:
    ...     print(list(report.summary.ranks[1].seconds)[:2])
    ['data', 'compute']
    """

    seconds: Mapping[str, float]
    share_with_slow_data: float
    delay: float
    extensions: Mapping[str, float]

    @property
    def iteration(self) -> float:
        """Mean seconds per iteration."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for most, in `Summary.straggler`.

    Attributes
    ----------
    rank : int
        Number of the rank.
    delay : float
        Mean seconds per iteration that the other ranks, on average, wait for it.
    part : str
        Part of an iteration that takes it longer than others, such as ``'data'``.
    seconds, others : float
        Mean seconds per iteration of that part: on this rank, and on average on the others.
    host : str
        Name of its host; empty if all ranks are on one host.

    Examples
    --------
    >>> from chainermn.profiling.timeline.summary import Straggler
    >>> print(Straggler(rank=1, delay=0.02, part="data", seconds=0.03, others=0.01))
    rank 1 keeps the others waiting for 20 ms per iteration: getting a batch takes 30 ms there,
    and 10 ms on the others
    """

    rank: int
    delay: float
    part: str
    seconds: float
    others: float
    host: str = ""

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return (
            f"rank {self.rank}{where} keeps the others waiting for {_ms(self.delay)} per "
            f"iteration: {_NAME_OF[self.part]} takes {_ms(self.seconds)} there, and "
            f"{_ms(self.others)} on the others"
        )


_NAME_OF = {
    "data": "getting a batch",
    "compute": "computing",
    "layers": "exchanging inside layers",
    "exchange": "exchanging",
    "evaluation": "evaluating",
    "checkpoint": "writing checkpoints",
    "extensions": "running extensions",
    "other": "other work",
}


@dataclass(frozen=True)
class Summary:
    """Summary of how all ranks spend their time; `DistributedReport` makes one.

    Examples
    --------
    >>> report = chainermn.extensions.DistributedReport(comm, filename=None)
    >>> trainer.extend(report)
    >>> trainer.run()
    >>> if comm.rank == 0:
    ...     summary = report.summary
    ...     rank, seconds = summary.slowest("compute")
    ...     print(0 < summary.mean("compute") <= seconds < summary.iteration)
    True
    """

    #: Summary of each rank.
    ranks: Sequence[RankSummary]
    #: Host of each rank; empty if all ranks are on one host.
    hosts: Sequence[str] = ()

    @property
    def iteration(self) -> float:
        """Mean seconds per iteration."""
        return _mean([rank.iteration for rank in self.ranks])

    def mean(self, part: str) -> float:
        """Return the mean seconds per iteration of a part, on average over the ranks."""
        return _mean([rank.seconds[part] for rank in self.ranks])

    def slowest(self, part: str) -> tuple[int, float]:
        """Return the rank for which a part takes longest, and its mean seconds per iteration."""
        seconds = [rank.seconds[part] for rank in self.ranks]
        return seconds.index(max(seconds)), max(seconds)

    @property
    def efficiency(self) -> float:
        """Parallel efficiency: fraction of the time without exchange and waiting, from 0 to 1.

        A single process would spend this time too. It might be faster, because no other process
        shares its cores and caches; the efficiency does not account for that.
        """
        lost = sum(map(self.mean, ("layers", "exchange", "waiting")))
        return 1 - lost / self.iteration

    @property
    def straggler(self) -> Straggler | None:
        """Rank that the others wait for most; None if they hardly wait, or for all equally."""
        delays = [rank.delay for rank in self.ranks]
        rank = delays.index(max(delays))
        is_late = delays[rank] > _LATE * self.iteration
        if not is_late or delays[rank] < _MORE_THAN_OTHERS * _mean(delays):
            return None
        others = [one.seconds for other, one in enumerate(self.ranks) if other != rank]
        own = self.ranks[rank].seconds
        usual = {part: _mean([one[part] for one in others]) for part in _NAME_OF}
        part = max(_NAME_OF, key=lambda part: own[part] - usual[part])
        host = self.hosts[rank] if self.hosts else ""
        return Straggler(rank, delays[rank], part, own[part], usual[part], host)

    def advice(self) -> list[str]:
        """Return a list of texts: what takes much time, and what to do about it."""
        found = []
        slow_data = [one.share_with_slow_data for one in self.ranks]
        rank = slow_data.index(max(slow_data))
        if self.ranks[rank].seconds["data"] > _MUCH["data"] * self.ranks[rank].iteration:
            found.append(
                f"{slow_data[rank]:.0%} of rank {rank}'s iterations wait for data: use a "
                "MultiprocessIterator, or give it more processes (--loaderjob in the apps)"
            )
        straggler = self.straggler
        if straggler is not None:
            found.append(f"{straggler}{_remedy_of(straggler, self.ranks[straggler.rank])}")
        elif self.mean("waiting") > _MUCH["waiting"] * self.iteration:
            found.append(
                f"ranks spend {self.mean('waiting') / self.iteration:.0%} of the time waiting for "
                "each other, for a different rank each time: give them batches that take equally "
                "long, and separate cores"
            )
        advice_of = _ADVICE | (_ADVICE_BETWEEN_HOSTS if self.hosts else {})
        for part, advice in advice_of.items():
            share = self.mean(part) / self.iteration
            if share > _MUCH[part]:
                found.append(f"{share:.0%} of the time goes into {advice}")
        return found


def summarize(
    ranks: Sequence[Sequence[Iteration]],
    clocks: Sequence[Clock | None],
    hosts: Sequence[str] = (),
) -> Summary:
    """Sum up where the time of all ranks goes.

    Parameters
    ----------
    ranks : sequence of sequences of Iteration
        Iterations of each rank, at least one.
    clocks : sequence of Clock or None
        Clock of each rank's host; None if its times are already on the common clock.
    hosts : sequence of str
        Host of each rank; may be omitted if all are on one host.
    """
    marked = [[call for one in of_rank for call in one.calls] for of_rank in ranks]
    calls = [
        [call if clock is None else _corrected(call, clock) for _, call in of_rank]
        for of_rank, clock in zip(marked, clocks, strict=True)
    ]
    waiting: list[Counter[str]] = [Counter() for _ in ranks]
    caused = [0] * len(ranks)
    for rank, found in enumerate(waits(calls)):
        for (kind, _), call, wait in zip(marked[rank], calls[rank], found, strict=True):
            if wait is not None:
                waiting[rank][kind] += wait.until - call.start
                caused[wait.rank] += wait.until - call.start
    n_others = max(len(ranks) - 1, 1)
    return Summary(
        [
            _summarize(of_rank, waiting[rank], caused[rank] / n_others)
            for rank, of_rank in enumerate(ranks)
        ],
        hosts if len(set(hosts)) > 1 else (),
    )


def _corrected(call: Call, clock: Clock) -> Call:
    return call._replace(start=clock.corrected(call.start), end=clock.corrected(call.end))


def _summarize(
    iterations: Sequence[Iteration], waiting: Mapping[str, int], caused: float
) -> RankSummary:
    total = {kind: sum(one.nanoseconds[kind] for one in iterations) for kind in KINDS}
    lost = {kind: min(waited, total[kind]) for kind, waited in waiting.items()}
    parts = {kind: total[kind] - lost.get(kind, 0) for kind in KINDS}
    parts["waiting"] = sum(lost.values())
    extensions: Counter[str] = Counter()
    for one in iterations:
        extensions.update(one.extensions)
    slow = [
        one.nanoseconds["data"] > _WAITS_FOR_DATA * sum(one.nanoseconds.values())
        for one in iterations
    ]
    unit = 1e9 * len(iterations)
    return RankSummary(
        {part: parts[part] / unit for part in PARTS},
        _mean(slow),
        caused / unit,
        {name: taken / unit for name, taken in extensions.most_common()},
    )


def _remedy_of(straggler: Straggler, rank: RankSummary) -> str:
    if straggler.part == "compute":
        return (
            ". Check whether its host runs other programs or more ranks than cores, and whether "
            "its batches are larger; `chainermn doctor` compares hosts"
        )
    if straggler.part == "extensions" and rank.extensions:
        name, seconds = next(iter(rank.extensions.items()))
        return (
            f". {name} takes most of it, {_ms(seconds)}: give it a trigger that fires less often"
        )
    return ""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
