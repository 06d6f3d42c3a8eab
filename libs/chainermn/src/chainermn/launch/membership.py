"""Which hosts a job runs on, decided anew for each attempt."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Container, Iterable, Sequence

import click

from chainermn.launch.hosts import Host, count_ranks, fill_hosts, parse_lines, show_places
from chainermn.launch.restarts import say

# A host that fails twice in a row is left out for so many seconds, then for twice as many.
BACKOFF = 30.0
_LONGEST_BACKOFF = 3600.0
# After an attempt that ran for so many seconds, a failure is no longer one in a row.
_LONG_RUN = 600.0
# Seconds until hosts are asked for again; each time twice as many, up to the second number.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 10.0
_SECONDS_FOR_SCRIPT = 60.0

Discover = Callable[[], list[Host]]
#: Takes names, and returns why some of these hosts cannot be used now.
FindUnusable = Callable[[Sequence[str]], dict[str, str]]


def discover_by(command: Sequence[str]) -> Discover:
    """Return a function that runs a script, which prints hosts as a hostfile names them."""

    def discover() -> list[Host]:
        try:
            shown = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                timeout=_SECONDS_FOR_SCRIPT,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DiscoveryError(f"{command[-1]}: {error}") from None
        if shown.returncode:
            raise DiscoveryError(f"{command[-1]} ended with exit code {shown.returncode}")
        try:
            return parse_lines(shown.stdout.splitlines(), command[-1])
        except ValueError as error:
            raise DiscoveryError(str(error)) from None

    return discover


class DiscoveryError(RuntimeError):
    """The script that names the hosts has failed; the message is one line."""


class Membership:
    """Chooses hosts, and remembers which of them keep failing.

    Parameters
    ----------
    discover : callable
        Returns the hosts that there are now.
    find_unusable : callable
        See `FindUnusable`.
    min_ranks : int
        Wait until the hosts take so many ranks.
    max_ranks : int or None
        Do not start more.
    patience : float
        Seconds to wait for hosts.
    pause : callable
        Sleeps for some seconds, and returns whether to go on.
    clock : callable
        Returns a time in seconds.
    """

    def __init__(
        self,
        discover: Discover,
        find_unusable: FindUnusable,
        *,
        min_ranks: int,
        max_ranks: int | None,
        patience: float,
        pause: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._discover = discover
        self._find_unusable = find_unusable
        self._min_ranks, self._max_ranks = min_ranks, max_ranks
        self._patience = patience
        self._pause, self._clock = pause, clock
        self._n_failures: dict[str, int] = {}
        self._left_out_until: dict[str, float] = {}
        #: Of the hosts that have not been chosen, why not.
        self.left_out: dict[str, str] = {}

    def choose(self) -> list[Host] | None:
        """Return the hosts to run on now, as soon as they take enough ranks.

        Returns None if the pause was ended. Raises ClickException if there are too few for too
        long.
        """
        start, seconds, said = self._clock(), _FIRST_PAUSE, ""
        while True:
            hosts, lack = self._look()
            if hosts:
                return hosts
            waited = self._clock() - start
            if waited >= self._patience:
                raise click.ClickException(f"{lack}; gave up after {waited:.0f} s (--wait)")
            if lack != said:
                say(f"{lack}; waiting for at most {self._patience:.0f} s")
                said = lack
            if not self._pause(min(seconds, self._patience)):
                return None
            seconds = min(2 * seconds, _LONGEST_PAUSE)

    def note_failure(self, hosts: Iterable[str], culprits: Container[str], seconds: float) -> None:
        """Remember which of the hosts of a failed attempt, which took so many seconds, failed."""
        for name in hosts:
            earlier = 0 if seconds > _LONG_RUN else self._n_failures.get(name, 0)
            self._n_failures[name] = number = earlier + 1 if name in culprits else 0
            if number > 1:
                backoff = min(BACKOFF * 2 ** (number - 2), _LONGEST_BACKOFF)
                self._left_out_until[name] = self._clock() + backoff
                times = f"failed {number} times in a row"
                say(f"{name} has {times}, and is left out for {backoff:g} s")

    def _look(self) -> tuple[list[Host], str]:
        """Return the hosts if they take enough ranks, or what is lacking."""
        try:
            there = self._discover()
        except DiscoveryError as error:
            return [], str(error)
        now = self._clock()
        self.left_out = {
            name: f"failed {self._n_failures[name]} times, wait {until - now:.0f} s"
            for name, _ in there
            if (until := self._left_out_until.get(name, now)) > now
        }
        self.left_out |= self._find_unusable([n for n, _ in there if n not in self.left_out])
        usable = [(name, places) for name, places in there if name not in self.left_out]
        ranks = count_ranks(usable)
        if ranks < self._min_ranks:
            offered = f"{show_places(usable)} take {ranks}" if usable else "there is no host"
            lack = f"at least {self._min_ranks} ranks are needed, but {offered}"
            return [], lack + (f" (left out: {', '.join(self.left_out)})" if self.left_out else "")
        return fill_hosts(usable, min(ranks, self._max_ranks or ranks)), ""
