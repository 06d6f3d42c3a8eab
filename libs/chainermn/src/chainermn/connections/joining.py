"""Connect ranks to a process of their job, although anybody may reach the same addresses.

Both ends prove that they know the key of the job: each answers the other's random number (nonce)
with its HMAC-SHA256. The key never travels on these connections; MPI and mpiexec, which are
trusted, carry it. The proofs include the address, so nobody can relay them between a rank and
another address. They do not protect later messages from an attacker who can change packets, but
such an attacker could also attack MPI.
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
from typing import Any, NamedTuple, cast

from chainermn.connections.channel import Channel, MalformedError
from chainermn.connections.messages import (
    Address,
    Challenge,
    Hello,
    Join,
    Member,
    Message,
    Welcome,
    decode,
    encode,
)
from chainermn.process.patience import AwakeClock

LOOPBACK = "127.0.0.1"
# Seconds that a peer gets to authenticate.
_SECONDS_TO_AUTHENTICATE = 5.0
# Places for unauthenticated peers at each address, even if few ranks are expected; also the number
# that are accepted at once before anyone is heard.
_FEWEST_PLACES = 64
# The peer's kernel accepts a connection quickly, but its process may be busy starting.
_SECONDS_TO_CONNECT = 3.0
_SECONDS_TO_ANSWER = 30.0
# Seconds before a rank tries a connection again. If a flood fills the listener's queue, the rank
# gets no error, and the kernel itself only tries again after 1 s and 3 s.
_SECONDS_TO_CONNECT_ONCE = 0.5
# Seconds between two attempts of a rank that lost its place to other peers.
_SECONDS_BETWEEN = 0.1
_SIOCGIFADDR = 0x8915


def own_addresses() -> list[str]:
    """Return the addresses at which other hosts may reach this one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    # A loopback address would lead another host to itself.
    others = [each for each in found if not each.startswith("127.") and each != "::1"]
    return list(dict.fromkeys(others)) or [LOOPBACK]


def listen(addresses: Iterable[str]) -> list[socket.socket]:
    """Return listening sockets, one for each address that belongs to this host.

    Raises OSError if none of the addresses does.
    """
    sockets, reason = [], OSError("no address to listen on")
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            sockets.append(socket.create_server((address, 0), family=family, backlog=1024))
        except OSError as error:  # for example, a router translates this address
            reason = error
    if not sockets:
        raise reason
    return sockets


class _Unauthenticated(NamedTuple):
    #: When it connected, from where, and to which of the listener's addresses.
    since: float
    origin: str
    address: str
    #: Facts to prove; None until it has said hello.
    handshake: _Handshake | None = None


class _Handshake(NamedTuple):
    """The facts that both ends know when they prove themselves to each other."""

    key: str
    #: The listener's address; one end also names the interface that it uses to reach it.
    address: str
    nonce_of_rank: str
    nonce_of_listener: str

    def proof(self, *what: Any) -> str:
        """Return the proof with which one end states these things."""
        address, *nonces = self[1:]
        text = json.dumps([address.partition("%")[0], *nonces, *what])
        return hmac.digest(bytes.fromhex(self.key), text.encode(), "sha256").hex()

    def is_proved(self, proof: str, *what: Any) -> bool:
        """Tell whether the other end knows the key and has stated these things."""
        return hmac.compare_digest(self.proof(*what).encode(), proof.encode())


class Listener:
    """Accepts peers that prove that they belong to the job, each rank once for each purpose.

    When all ranks have joined, it stops listening and drops everyone else. Until then, it drops
    unauthenticated peers after 5 seconds or 4 KiB. If there are more of them than there could be
    ranks, it drops the oldest one from the address that has most of them. Peers that have said
    hello have separate places, so a flood of connections alone cannot take those.

    Parameters
    ----------
    sockets : sequence of socket.socket
        Listening sockets, as returned by `listen`.
    key : str
        Key of the job.
    ranks : iterable of int
        Expected ranks.
    purposes : sequence of str
        Purposes for which each rank connects.
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
        self._peers: dict[Channel, _Unauthenticated] = {}
        self._n_places = _FEWEST_PLACES
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self._open(sockets)
        self._hosts = [each.host for each in self.addresses]
        self.expect(ranks)

    @property
    def addresses(self) -> list[Address]:
        """The addresses on which it listens."""
        return [_address_of(each) for each in self._sockets]

    def expect(self, ranks: Iterable[int]) -> None:
        """Accept these ranks as well, on new sockets if needed; raise OSError if none works."""
        if not self._sockets:
            self._open(listen(self._hosts))
        self._expected |= {(rank, purpose) for rank in ranks for purpose in self._purposes}
        # A rank tries all addresses at once.
        places = max(_FEWEST_PLACES, len(self._expected)) * len(self._sockets)
        self._n_places = max(self._n_places, places)

    def fileno(self) -> int:
        """Return a file descriptor that is readable as soon as `serve` has something to do."""
        return cast(Any, self._selector).fileno()

    def serve(self, now: float) -> list[tuple[Channel, Member]]:
        """Handle everything that has arrived; return the members that have just joined.

        ``now`` is the time in seconds, by any clock.
        """
        joined = []
        ready = [key.fileobj for key, _ in self._selector.select(0)]
        # Hear those that have sent something before they may have to make room for others.
        for channel in ready:
            if isinstance(channel, Channel) and channel in self._peers:
                try:
                    if member := self._hear(channel):
                        joined.append((channel, member))
                except ConnectionError:
                    self._drop(channel)
        for listening in ready:
            if isinstance(listening, socket.socket):
                self._accept(listening, now)
        while (
            self._peers and now - next(iter(self._peers.values())).since > _SECONDS_TO_AUTHENTICATE
        ):
            self._drop(next(iter(self._peers)))
        if not self._expected:
            self.stop()
        return joined

    def expect_no_more(self, ranks: Iterable[int]) -> None:
        """Stop expecting these ranks."""
        self._expected = {each for each in self._expected if each[0] not in {*ranks}}

    def stop(self) -> None:
        """Stop listening, and drop everyone who has not joined."""
        while self._sockets:
            listening = self._sockets.pop()
            self._selector.unregister(listening)
            listening.close()
        for channel in [*self._peers]:
            self._drop(channel)

    def close(self) -> None:
        """Stop listening, and free the file descriptor."""
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
            except OSError:  # perhaps this process cannot open another file
                self._drop_one_of(self._peers)
                return
            self._make_room(has_greeted=False)
            channel = Channel(connection)
            address = connection.getsockname()[0]
            self._peers[channel] = _Unauthenticated(now, origin, address)
            self._selector.register(channel, selectors.EVENT_READ)

    def _hear(self, channel: Channel) -> Member | None:
        for message in channel.receive((Hello, Join), only_first=True):
            peer = self._peers[channel]
            handshake = peer.handshake
            if isinstance(message, Hello) and handshake is None:
                self._make_room(has_greeted=True)
                handshake = _Handshake(
                    self._key, peer.address, message.nonce, os.urandom(16).hex()
                )
                self._peers[channel] = peer._replace(handshake=handshake)
                proof = handshake.proof("listener")
                channel.send(Challenge(handshake.nonce_of_listener, proof))
            elif isinstance(message, Join) and handshake is not None:
                member = message.member
                if not handshake.is_proved(message.proof, "rank", *member):
                    raise MalformedError("not of this job")
                if (member.rank, member.purpose) not in self._expected:
                    raise MalformedError("a rank that has joined before or does not exist")
                self._expected.remove((member.rank, member.purpose))
                self._selector.unregister(channel)
                del self._peers[channel]
                channel.trust()
                channel.send(Welcome())
                return member
            else:
                raise MalformedError("not what a rank would send")
        return None

    def _make_room(self, *, has_greeted: bool) -> None:
        """Make room for one more peer, among those that have said hello or those that have not."""
        if len(self._peers) >= self._n_places:
            crowd = {
                channel: peer
                for channel, peer in self._peers.items()
                if (peer.handshake is not None) is has_greeted
            }
            if len(crowd) >= self._n_places:
                self._drop_one_of(crowd)

    def _drop_one_of(self, crowd: dict[Channel, _Unauthenticated]) -> None:
        """Drop the oldest peer from the address that has most of them."""
        for origin, _ in Counter(each.origin for each in crowd.values()).most_common(1):
            self._drop(next(it for it, peer in crowd.items() if peer.origin == origin))

    def _drop(self, channel: Channel) -> None:
        self._selector.unregister(channel)
        del self._peers[channel]
        channel.close()


class Endpoint(NamedTuple):
    """The addresses of a `Listener`, and the key of the job."""

    addresses: list[Address]
    key: str

    @classmethod
    def of(cls, sockets: Iterable[socket.socket]) -> Endpoint:
        """Return the endpoint of these sockets, with a new key."""
        return cls([_address_of(each) for each in sockets], os.urandom(32).hex())

    @classmethod
    def from_text(cls, text: str) -> Endpoint:
        """Rebuild an endpoint from `as_text`; raise ValueError if that is not what this is."""
        return cast(Endpoint, decode(text.encode(), [cls]))

    def as_text(self) -> str:
        """Return a line of text to hand to ranks in secret, since it includes the key."""
        return encode(self).decode().rstrip()

    def join(self, member: Member) -> Channel | None:
        """Join at the first address whose listener knows the key; return None if none does."""
        patience = _Patience()
        while connected := self._connect(patience):
            channel, handshake = connected
            join = Join(member, handshake.proof("rank", *member))
            if patience.answer(channel, join, Welcome) is not None:
                channel.trust()
                return channel
            channel.close()
            time.sleep(_SECONDS_BETWEEN)
        return None

    def _connect(self, patience: _Patience) -> tuple[Channel, _Handshake] | None:
        """Connect to a listener that proves itself."""
        nonce = os.urandom(16).hex()
        answers = patience.answers(self.addresses, Hello(nonce), Challenge)
        with contextlib.closing(answers):
            for channel, address, challenge in answers:
                handshake = _Handshake(self.key, address.host, nonce, challenge.nonce)
                if handshake.is_proved(challenge.proof, "listener"):
                    return channel, handshake
                channel.close()
        return None


class _Patience:
    """Limits the total time to wait for answers."""

    def __init__(self) -> None:
        self._clock = AwakeClock(longest_step=_SECONDS_TO_CONNECT_ONCE)
        self._start = self._clock.read()
        self._deadline = self._start + _SECONDS_TO_CONNECT

    def answers(
        self, addresses: Sequence[Address], question: Message, kind: type[Message]
    ) -> Generator[tuple[Channel, Address, Any], None, None]:
        """Iterate over the first answer from each address, with its connection.

        If a connection fails or closes before that, this tries again, unless the peer refuses the
        connection or sends something other than a message of this type.
        """
        with selectors.DefaultSelector() as selector, _closing_all(selector):
            lost = [*addresses]
            while (lost or selector.get_map()) and (
                left := self._deadline - self._clock.read()
            ) > 0:
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
                        # Only the first: whoever gets the channel reads the rest.
                        messages = channel.receive([kind], only_first=True)
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

    def answer(self, channel: Channel, question: Message, kind: type[Message]) -> Message | None:
        """Return the peer's answer of this type; None if there is none before the time is up."""
        channel.send(question)
        with selectors.DefaultSelector() as selector, contextlib.suppress(ConnectionError):
            selector.register(channel, selectors.EVENT_READ)
            while (left := self._deadline - self._clock.read()) > 0:
                ready = selector.select(min(left, _SECONDS_TO_CONNECT_ONCE))
                if ready and (messages := channel.receive([kind], only_first=True)):
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
        with contextlib.suppress(OSError):  # this host is not on that network
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
