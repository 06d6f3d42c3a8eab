"""How ranks connect to a process of their job, while strangers may reach the same addresses.

Both ends prove that they know the key of the job, which never travels on these connections (MPI
and mpiexec, which are trusted, carry it): each answers a random number of the other's (a nonce)
with an HMAC-SHA256 of it. The proofs also hold the address, so nobody can pass them on between a
rank and another address. They do not protect what follows from those who can change the packets
of others, who could do the same to MPI.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from time import monotonic
from typing import Any, NamedTuple, cast

from chainermn.failures.channel import Channel, MalformedError
from chainermn.failures.messages import (
    Address,
    Challenge,
    Hello,
    Join,
    Member,
    Message,
    Welcome,
)

LOOPBACK = "127.0.0.1"
# For a stranger to prove that it is none.
_SECONDS_FOR_STRANGERS = 5.0
# Places for strangers at each address, even where few ranks are expected; and how many come to one
# before those who have come are heard.
_FEWEST_PLACES = 64
# The peer's kernel accepts a connection; only its process, which may be starting, answers.
_SECONDS_TO_CONNECT = 3.0
_SECONDS_TO_ANSWER = 30.0
# After which a connection is tried anew. A flood fills the listener's queue, of which one learns
# nothing; by itself, the kernel tries again after 1 s and 3 s.
_SECONDS_TO_CONNECT_ONCE = 0.5
# Between two attempts of a rank that lost its place to strangers.
_SECONDS_BETWEEN = 0.1
_SIOCGIFADDR = 0x8915


def own_addresses() -> list[str]:
    """Return the addresses under which other hosts may reach this one."""
    found = list(_interface_addresses())
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    # On another host, its loopback address leads to itself.
    others = [each for each in found if not each.startswith("127.") and each != "::1"]
    return list(dict.fromkeys(others)) or [LOOPBACK]


def listen(addresses: Iterable[str]) -> list[socket.socket]:
    """Return sockets that accept connections, one for each address that this host has.

    Raises OSError if it has none of them.
    """
    sockets, reason = [], OSError("no address to listen on")
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            sockets.append(socket.create_server((address, 0), family=family, backlog=1024))
        except OSError as error:  # as of an address that is translated on the way to this host
            reason = error
    if not sockets:
        raise reason
    return sockets


class _Stranger(NamedTuple):
    #: When it has come, from where, and to which of the listener's addresses.
    since: float
    origin: str
    address: str
    #: What it has to prove, once it has said hello.
    exchange: _Exchange | None = None


class _Exchange(NamedTuple):
    """What both ends know when they prove themselves to each other."""

    key: str
    #: The listener's, without the interface that one end reaches it by.
    address: str
    nonce_of_rank: str
    nonce_of_listener: str

    def proof(self, *what: Any) -> str:
        """Return the proof of one end, which says these things."""
        text = json.dumps([*self[1:], *what])
        return hmac.digest(bytes.fromhex(self.key), text.encode(), "sha256").hex()

    def is_proved(self, proof: str, *what: Any) -> bool:
        """Tell whether the other end knows the key, and has said these things."""
        return hmac.compare_digest(self.proof(*what).encode(), proof.encode())


class Listener:
    """Lets in those who prove that they belong to the job, each rank once for each purpose.

    As soon as all ranks have joined, it stops listening and drops all others. Until then, it drops
    strangers after 5 seconds or 4 KiB. If there are more of them than ranks could be, it drops the
    oldest from the address that has most. Those who speak as a rank have places of their own, so
    that a flood of connections alone cannot take them.

    Parameters
    ----------
    sockets : sequence of socket.socket
        As `listen` returns them.
    key : str
    ranks : iterable of int
        Who is expected.
    purposes : sequence of str
        What each rank connects for.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        key: str,
        ranks: Iterable[int],
        purposes: Sequence[str],
    ) -> None:
        self._key, self._purposes = key, purposes
        self._expected: set[tuple[int, str]] = set()
        self._strangers: dict[Channel, _Stranger] = {}
        self._n_places = _FEWEST_PLACES
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self._open(sockets)
        self._hosts = [each.host for each in self.addresses]
        self.expect(ranks)

    @property
    def addresses(self) -> list[Address]:
        """Where it listens."""
        return [_address_of(each) for each in self._sockets]

    def expect(self, ranks: Iterable[int]) -> None:
        """Let in these ranks as well, if need be by new sockets; raise OSError if none works."""
        if not self._sockets:
            self._open(listen(self._hosts))
        self._expected |= {(rank, purpose) for rank in ranks for purpose in self._purposes}
        # A rank tries all addresses at once.
        places = max(_FEWEST_PLACES, len(self._expected)) * len(self._sockets)
        self._n_places = max(self._n_places, places)

    def fileno(self) -> int:
        """Return a file descriptor that can be read as soon as `serve` has something to do."""
        return cast(Any, self._selector).fileno()

    def serve(self, now: float) -> list[tuple[Channel, Member]]:
        """Do what there is to do; return those who have just joined.

        ``now`` is the time in seconds, by any clock.
        """
        joined = []
        ready = [key.fileobj for key, _ in self._selector.select(0)]
        # Those who speak are heard before they may have to make room for others.
        for channel in ready:
            if isinstance(channel, Channel) and channel in self._strangers:
                try:
                    if member := self._hear(channel):
                        joined.append((channel, member))
                except ConnectionError:
                    self._drop(channel)
        for listening in ready:
            if isinstance(listening, socket.socket):
                self._accept(listening, now)
        while (oldest := self._oldest()) and now - oldest[1].since > _SECONDS_FOR_STRANGERS:
            self._drop(oldest[0])
        if not self._expected:
            self.stop()
        return joined

    def expect_no_more(self, ranks: Iterable[int]) -> None:
        """Take note that these ranks never come, unless they have."""
        self._expected = {each for each in self._expected if each[0] not in {*ranks}}

    def stop(self) -> None:
        """Listen to nobody any more, except those who have joined."""
        while self._sockets:
            listening = self._sockets.pop()
            self._selector.unregister(listening)
            listening.close()
        for channel in [*self._strangers]:
            self._drop(channel)

    def close(self) -> None:
        """Stop, and free the file descriptor."""
        self.stop()
        self._selector.close()

    def _open(self, sockets: Iterable[socket.socket]) -> None:
        for each in sockets:
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
            self._sockets.append(each)

    def _accept(self, listening: socket.socket, now: float) -> None:
        for _ in range(_FEWEST_PLACES):
            try:
                connection, (origin, *_) = listening.accept()
            except BlockingIOError:
                return
            except OSError:  # perhaps no more files can be opened
                self._drop_one_of(self._strangers)
                return
            self._make_room(has_greeted=False)
            channel = Channel(connection)
            address = connection.getsockname()[0]
            self._strangers[channel] = _Stranger(now, origin, address)
            self._selector.register(channel, selectors.EVENT_READ)

    def _hear(self, channel: Channel) -> Member | None:
        for message in channel.receive(only_first=True):
            stranger = self._strangers[channel]
            exchange = stranger.exchange
            if isinstance(message, Hello) and exchange is None:
                self._make_room(has_greeted=True)
                exchange = _exchange(self._key, stranger.address, message.nonce, _nonce())
                self._strangers[channel] = stranger._replace(exchange=exchange)
                proof = exchange.proof("listener")
                channel.send(Challenge(exchange.nonce_of_listener, proof))
            elif isinstance(message, Join) and exchange is not None:
                member = message.member
                if not exchange.is_proved(message.proof, "rank", *member):
                    raise MalformedError("not of this job")
                if (member.rank, member.purpose) not in self._expected:
                    raise MalformedError("a rank that has joined before, or does not exist")
                self._expected.remove((member.rank, member.purpose))
                self._selector.unregister(channel)
                del self._strangers[channel]
                channel.trust()
                channel.send(Welcome())
                return member
            else:
                raise MalformedError("not what a rank says")
        return None

    def _oldest(self) -> tuple[Channel, _Stranger] | None:
        return next(iter(self._strangers.items()), None)

    def _make_room(self, *, has_greeted: bool) -> None:
        """Have a place for one more of those who have said hello, or of those who have not."""
        if len(self._strangers) >= self._n_places:
            crowd = {
                channel: stranger
                for channel, stranger in self._strangers.items()
                if (stranger.exchange is not None) is has_greeted
            }
            if len(crowd) >= self._n_places:
                self._drop_one_of(crowd)

    def _drop_one_of(self, crowd: dict[Channel, _Stranger]) -> None:
        """Drop the oldest from the address that most come from."""
        for origin, _ in Counter(each.origin for each in crowd.values()).most_common(1):
            self._drop(next(it for it, stranger in crowd.items() if stranger.origin == origin))

    def _drop(self, channel: Channel) -> None:
        self._selector.unregister(channel)
        del self._strangers[channel]
        channel.close()


class Entrance(NamedTuple):
    """Where ranks find a `Listener`, and the key of the job."""

    addresses: list[Address]
    key: str

    @classmethod
    def to(cls, sockets: Iterable[socket.socket]) -> Entrance:
        """Return how to find the listener of these sockets, with a new key."""
        return cls([_address_of(each) for each in sockets], os.urandom(32).hex())

    def enter(self, member: Member) -> Channel | None:
        """Join, by the first address whose listener knows the key; return None if none does."""
        patience = _Patience()
        while met := self._meet(patience):
            channel, exchange = met
            join = Join(member, exchange.proof("rank", *member))
            if isinstance(patience.answer(channel, join), Welcome):
                channel.trust()
                return channel
            channel.close()
            time.sleep(_SECONDS_BETWEEN)
        return None

    def _meet(self, patience: _Patience) -> tuple[Channel, _Exchange] | None:
        """Connect to a listener that proves itself; return also what both ends know by then."""
        nonce = _nonce()
        with contextlib.closing(patience.answers(self.addresses, Hello(nonce))) as answers:
            for channel, address, message in answers:
                if isinstance(message, Challenge):
                    exchange = _exchange(self.key, address.host, nonce, message.nonce)
                    if exchange.is_proved(message.proof, "listener"):
                        return channel, exchange
                channel.close()
        return None


class _Patience:
    """How long to wait for answers, in all."""

    def __init__(self) -> None:
        self._start = monotonic()
        self._deadline = self._start + _SECONDS_TO_CONNECT

    def answers(
        self, addresses: Sequence[Address], question: Message
    ) -> Generator[tuple[Channel, Address, Message], None, None]:
        """Iterate over what those who listen say first, with the connections to them.

        Where one is closed before that, or not even made, another one is tried, unless it is
        refused, or something comes that is no message.
        """
        with selectors.DefaultSelector() as selector, _closing_all(selector):
            lost = [*addresses]
            while (lost or selector.get_map()) and (left := self._deadline - monotonic()) > 0:
                for channel, address in _connecting(lost):
                    selector.register(channel, selectors.EVENT_WRITE, address)
                lost = []
                ready = selector.select(min(left, _SECONDS_TO_CONNECT_ONCE))
                if not ready:
                    for key in [*selector.get_map().values()]:
                        if key.events == selectors.EVENT_WRITE:
                            selector.unregister(key.fileobj)
                            cast(Channel, key.fileobj).close()
                            lost.append(key.data)
                for key, _ in ready:
                    channel = cast(Channel, key.fileobj)
                    try:
                        if key.events == selectors.EVENT_WRITE:
                            channel.check_connection()
                            self._deadline = self._start + _SECONDS_TO_ANSWER
                            channel.send(question)
                            selector.modify(channel, selectors.EVENT_READ, key.data)
                        # What follows the answer is for those who read later.
                        messages = channel.receive(only_first=True)
                    except ConnectionError as error:
                        selector.unregister(channel)
                        channel.close()
                        if not isinstance(error, (ConnectionRefusedError, MalformedError)):
                            lost.append(key.data)
                    else:
                        for message in messages:
                            selector.unregister(channel)
                            yield channel, key.data, message
                if lost:
                    time.sleep(_SECONDS_BETWEEN)

    def answer(self, channel: Channel, question: Message) -> Message | None:
        """Return what somebody says next; None if the connection is closed, or time is up."""
        channel.send(question)
        with selectors.DefaultSelector() as selector, contextlib.suppress(ConnectionError):
            selector.register(channel, selectors.EVENT_READ)
            while (left := self._deadline - monotonic()) > 0:
                if selector.select(left) and (messages := channel.receive(only_first=True)):
                    return messages[0]
        return None


@contextlib.contextmanager
def _closing_all(selector: selectors.BaseSelector) -> Iterator[None]:
    try:
        yield
    finally:
        for key in selector.get_map().values():
            cast(Channel, key.fileobj).close()


def _connecting(addresses: Iterable[Address]) -> Iterator[tuple[Channel, Address]]:
    for address in addresses:
        with contextlib.suppress(OSError):  # no such network here
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            connection = socket.socket(family)
            channel = Channel(connection)
            try:
                connection.connect_ex(address)
            except OSError:
                channel.close()
                raise
            yield channel, address


def _address_of(listening: socket.socket) -> Address:
    return Address(*listening.getsockname()[:2])


def _exchange(key: str, address: str, *nonces: str) -> _Exchange:
    return _Exchange(key, address.partition("%")[0], *nonces)


def _nonce() -> str:
    return os.urandom(16).hex()


def _interface_addresses() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                yield socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
