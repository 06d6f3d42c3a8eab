"""Choose the hosts of each attempt to run a job."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Container, Iterable, Sequence

import click

from chainermn.launch.hosts import Host, count_ranks, fill_hosts, parse_lines, show_places
from chainermn.launch.restarts import say

# Seconds to leave out a host that fails twice in a row; doubled by every further failure.
BACKOFF = 30.0
_LONGEST_BACKOFF = 3600.0
# Seconds of running after which earlier failures no longer count.
_LONG_RUN = 600.0
# Seconds between two looks for hosts: doubled each time, from the first number to the second.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 10.0
_SECONDS_FOR_SCRIPT = 60.0

Discover = Callable[[], list[Host]]
#: Takes names of hosts; returns those that cannot be used now, with the reason for each.
FindUnusable = Callable[[Sequence[str]], dict[str, str]]


def discover_by(command: Sequence[str]) -> Discover:
    """Return a function that runs a script, whose output it reads as a hostfile."""

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
    """Raised if the script that names the hosts fails; the message is one line."""


class Membership:
    """Chooses hosts, and remembers which of them keep failing.

    Parameters
    ----------
    discover : callable
        Function that returns the hosts that exist now.
    find_unusable : callable
        Function that finds the hosts to leave out; see `FindUnusable`.
    min_ranks : int
        Number of ranks that the hosts must take before an attempt starts.
    max_ranks : int or None
        Largest number of ranks to start.
    patience : float
        Seconds to wait for hosts.
    pause : callable
        Function that sleeps for some seconds and returns whether to continue.
    clock : callable
        Function that returns a time in seconds.
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
        #: Hosts that were not chosen, and why.
        self.left_out: dict[str, str] = {}

    def choose(self) -> list[Host] | None:
        """Wait until the hosts take enough ranks, and return those to run on.

        Returns None if a signal ends the wait. Raises ClickException once it exceeds ``patience``.
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
                say(f"{lack}; waiting up to {self._patience:.0f} s")
                said = lack
            if not self._pause(min(seconds, self._patience)):
                return None
            seconds = min(2 * seconds, _LONGEST_PAUSE)

    def note_failure(self, hosts: Iterable[str], culprits: Container[str], seconds: float) -> None:
        """Count the failures of each host after an attempt that failed after some seconds."""
        for name in hosts:
            earlier = 0 if seconds > _LONG_RUN else self._n_failures.get(name, 0)
            self._n_failures[name] = number = earlier + 1 if name in culprits else 0
            if number > 1:
                backoff = min(BACKOFF * 2 ** (number - 2), _LONGEST_BACKOFF)
                self._left_out_until[name] = self._clock() + backoff
                say(f"{name} failed {number} times in a row; leaving it out for {backoff:g} s")

    def _look(self) -> tuple[list[Host], str]:
        """Return the hosts if they take enough ranks, or a message that says what is missing."""
        try:
            there = self._discover()
        except DiscoveryError as error:
            return [], str(error)
        now = self._clock()
        self.left_out = {
            name: f"failed {self._n_failures[name]} times, left out for {until - now:.0f} s"
            for name, _ in there
            if (until := self._left_out_until.get(name, now)) > now
        }
        self.left_out |= self._find_unusable([n for n, _ in there if n not in self.left_out])
        usable = [(name, places) for name, places in there if name not in self.left_out]
        ranks = count_ranks(usable)
        if ranks < self._min_ranks:
            offered = (
                f"{show_places(usable)} take {ranks}" if usable else "there is no usable host"
            )
            lack = f"at least {self._min_ranks} ranks are needed, but {offered}"
            return [], lack + (f" (left out: {', '.join(self.left_out)})" if self.left_out else "")
        return fill_hosts(usable, min(ranks, self._max_ranks or ranks)), ""
