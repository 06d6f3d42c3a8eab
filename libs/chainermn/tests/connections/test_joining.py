"""Who may join a job: each rank that knows the key, once, and nobody else."""

from __future__ import annotations

import fcntl
import hmac
import itertools
import json
import select
import selectors
import socket
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from chainermn.connections import joining
from chainermn.connections.channel import Channel
from chainermn.connections.joining import LOOPBACK, Endpoint, Listener, listen
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
from chainermn.failures.messages import End, Tick
from chainermn.process.patience import AwakeClock
from libs.chainermn.tests.connections.strangers import visit

TIMEOUT = 60.0


def member(rank: int, purpose: str = "watch") -> Member:
    return Member(rank, purpose, "here", 100 + rank)


def proof(key: str, *what: object) -> str:
    """Return a proof, computed independently of the module."""
    return hmac.new(bytes.fromhex(key), json.dumps(what).encode(), "sha256").hexdigest()


def until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def receive(channel: Channel) -> list[Message]:
    heard: list[Message] = []
    until(lambda: heard.extend(channel.receive([End])) or heard)
    return heard


class Serving:
    """A listener for two ranks, in a thread."""

    def __init__(self) -> None:
        sockets = listen([LOOPBACK])
        self.endpoint = Endpoint.of(sockets)
        self.joined: dict[Member, Channel] = {}
        self.listener = Listener(sockets, self.endpoint.key, range(2), ["watch"])
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            self.joined |= {who: channel for channel, who in self.listener.serve(0.0)}

    def join(self, rank: int) -> Channel:
        channel = self.endpoint.join(member(rank))
        assert channel is not None
        return channel

    def close(self) -> None:
        self._is_over = True
        self._thread.join(TIMEOUT)
        self.listener.close()
        for channel in self.joined.values():
            channel.close()


@pytest.fixture
def serving() -> Iterator[Serving]:
    started = Serving()
    yield started
    started.close()


class Stranger:
    """Anybody who connects."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.socket = socket.create_connection(endpoint.addresses[0], timeout=TIMEOUT)
        self.address = self.socket.getpeername()[0]

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.socket.sendall(encode(message))

    def has_been_delivered(self) -> bool:
        """Tell whether everything sent so far has reached the listener's socket."""
        return not any(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)))

    def hear(self) -> bytes:
        """Return the next line, or an empty one if the connection has been closed."""
        with self.socket.makefile("rb", buffering=0) as lines:
            try:
                return lines.readline()
            except ConnectionResetError:
                return b""

    def challenge(self, nonce: str) -> Challenge:
        self.say(Hello(nonce))
        found = decode(self.hear().strip(), [Challenge])
        assert isinstance(found, Challenge)
        return found

    def join(self, key: str, member: Member) -> bytes:
        """Join as a rank does; return the listener's answer."""
        challenge = self.challenge("a nonce")
        self.say(Join(member, self.answer_to(challenge, key, member)))
        return self.hear()

    def answer_to(self, challenge: Challenge, key: str, member: Member) -> str:
        """Check the listener's proof; return that of a rank."""
        facts = self.address, "a nonce", challenge.nonce
        assert challenge.proof == proof(key, *facts, "listener")
        return proof(key, *facts, "rank", *member)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()


def with_news(strangers: list[Stranger]) -> list[socket.socket]:
    """Return those who hear something, if only the end of their connection."""
    return select.select([each.socket for each in strangers], [], [], 0)[0]


class Stepping:
    """A listener that takes a step only when the test says so."""

    def __init__(
        self, stack: ExitStack, size: int = 2, addresses: Sequence[str] = (LOOPBACK,)
    ) -> None:
        sockets = listen(addresses)
        self.endpoint = Endpoint.of(sockets)
        self.listener = Listener(sockets, self.endpoint.key, range(size), ["watch"])
        self._stack = stack
        stack.callback(self.listener.close)

    def step(self, now: float = 0.0) -> None:
        for channel, _ in self.listener.serve(now):
            self._stack.callback(channel.close)

    def answer(self, stranger: Stranger, *words: Message) -> bytes:
        """Send words to the listener; return its answer."""
        stranger.say(*words)
        until(lambda: self.step() or with_news([stranger]))
        return stranger.hear()

    def join(self, rank: Stranger, challenge: bytes, number: int = 0) -> None:
        asked = decode(challenge.strip(), [Challenge])
        assert isinstance(asked, Challenge)
        answer = rank.answer_to(asked, self.endpoint.key, member(number))
        assert self.answer(rank, Join(member(number), answer)) == encode(Welcome())

    def connect(self, n_strangers: int, origin: str = LOOPBACK, words: bytes = b"") -> None:
        for _ in range(n_strangers):
            address = self.endpoint.addresses[0]
            connection = socket.create_connection(address, source_address=(origin, 0))
            self._stack.enter_context(connection).sendall(words)


@pytest.fixture
def stepping() -> Iterator[Stepping]:
    with ExitStack() as stack:
        yield Stepping(stack)


def is_refused(endpoint: Endpoint) -> bool:
    with socket.socket() as stranger:
        return stranger.connect_ex(endpoint.addresses[0]) != 0


# ---- ranks ----


def test_ranks_join_and_nobody_can_connect_any_more(serving: Serving) -> None:
    first = serving.join(0)
    assert not is_refused(serving.endpoint)
    second = serving.join(1)
    until(lambda: len(serving.joined) == 2 and is_refused(serving.endpoint))
    assert sorted(serving.joined) == [member(0), member(1)]
    for channel, rank in ((first, 0), (second, 1)):
        serving.joined[member(rank)].send(End(rank, ""))
        assert receive(channel) == [End(rank, "")]
        channel.close()


def test_rank_that_never_comes_is_not_waited_for(serving: Serving) -> None:
    serving.join(1).close()
    serving.listener.expect_no_more([0])
    until(lambda: is_refused(serving.endpoint))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, serving: Serving) -> list[bytes]:
    """Let rank 0 join; return everything that it and the listener have sent."""
    sent: list[bytes] = []
    really_send = Channel.send_encoded

    def note(self: Channel, data: bytes) -> None:
        sent.append(data)
        really_send(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "send_encoded", note)
        serving.join(0).close()
    return sent


def test_key_is_never_sent(said: list[bytes], serving: Serving) -> None:
    kinds = [message.split(b'"')[1] for message in said]
    assert kinds == [b"Hello", b"Challenge", b"Join", b"Welcome"]
    assert serving.endpoint.key.encode() not in b"".join(said)


def test_first_of_several_addresses_that_knows_the_key(serving: Serving) -> None:
    (here,) = serving.endpoint.addresses
    # One is reserved for documentation; the other needs an interface that does not exist.
    nobody = [Address("192.0.2.1", 7), Address("fe80::1%missing", 7)]
    channel = Endpoint([*nobody, here], serving.endpoint.key).join(member(0))
    assert channel is not None
    channel.close()


def test_one_socket_for_each_address_of_this_host() -> None:
    sockets = listen(["127.0.0.1", "192.0.2.1", "127.0.0.2"])
    assert [each.getsockname()[0] for each in sockets] == ["127.0.0.1", "127.0.0.2"]
    for each in sockets:
        each.close()
    with pytest.raises(OSError, match="assign requested address"):
        listen(["192.0.2.1"])


def test_addresses_for_other_hosts_are_none_that_lead_back_there() -> None:
    found = joining.own_addresses()
    assert found == [LOOPBACK] or not [each for each in found if each.startswith("127.")]


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    # With this clock, any wait would last forever.
    monkeypatch.setattr(AwakeClock, "read", lambda clock: 0.0)
    (listening,) = listen([LOOPBACK])
    with listening:
        endpoint = Endpoint.of([listening])
    assert endpoint.join(member(0)) is None


@pytest.mark.parametrize(("seconds", "is_in_time"), [(29.0, True), (30.0, False)])
def test_answer_may_take_longer_than_the_connection(
    seconds: float, is_in_time: bool, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_connection(self: Channel) -> None:
        really_check(self)
        monkeypatch.setattr(AwakeClock, "read", lambda clock: seconds)

    really_check = Channel.check_connection
    monkeypatch.setattr(AwakeClock, "read", lambda clock: 0.0)
    monkeypatch.setattr(Channel, "check_connection", check_connection)
    channel = serving.endpoint.join(member(0))
    assert (channel is not None) == is_in_time
    if channel is not None:
        channel.close()


def test_rank_whose_host_sleeps_while_it_connects(
    monkeypatch: pytest.MonkeyPatch, serving: Serving
) -> None:
    awake, sleep = time.monotonic, itertools.chain([0.0], itertools.count(100.0, 100.0))
    monkeypatch.setattr(time, "monotonic", lambda: awake() + next(sleep))
    serving.join(1).close()


def test_rank_that_lost_its_place_tries_again() -> None:
    (listening,) = listen([LOOPBACK])
    with listening, ThreadPoolExecutor(1) as threads:
        endpoint = Endpoint.of([listening])
        on_rank = threads.submit(endpoint.join, member(0))
        listening.accept()[0].close()
        listener = Listener([listening], endpoint.key, [0], ["watch"])
        joined: list[tuple[Channel, Member]] = []
        until(lambda: joined.extend(listener.serve(0.0)) or joined)
        ((ours, who),) = joined
        assert who == member(0)
        theirs = on_rank.result(TIMEOUT)
        assert theirs is not None
        for channel in (ours, theirs):
            channel.close()
        listener.close()


def test_rank_that_lost_its_place_tries_again_while_others_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AwakeClock, "read", lambda clock: 0.0)  # it never gives up
    (listening,), (silent,) = listen([LOOPBACK]), listen(["127.0.0.2"])
    listening.settimeout(TIMEOUT)
    with ThreadPoolExecutor(1) as threads:
        with listening, silent:
            on_rank = threads.submit(Endpoint.of([silent, listening]).join, member(0))
            listening.accept()[0].close()
            with silent.accept()[0] as other, listening.accept()[0] as again:
                assert decode(again.recv(100).strip(), [Hello]) == decode(
                    other.recv(100).strip(), [Hello]
                )
                silent.close()
                listening.close()
        assert on_rank.result(TIMEOUT) is None


def test_rank_for_whom_there_is_no_room_in_the_queue_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[socket.socket] = []

    class Noted(Channel):
        def __init__(self, connection: socket.socket) -> None:
            tried.append(connection)
            super().__init__(connection)

    monkeypatch.setattr(joining, "Channel", Noted)
    monkeypatch.setattr(AwakeClock, "read", lambda clock: 0.0)  # it never gives up
    with ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((LOOPBACK, 0), backlog=0))
        endpoint = Endpoint.of([listening])
        for _ in range(2):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(endpoint.addresses[0])
        on_rank = threads.submit(endpoint.join, member(0))
        until(lambda: len(tried) >= 2)
        stack.close()
        assert on_rank.result(TIMEOUT) is None


# ---- strangers who connect ----


def test_stranger_who_does_not_know_the_key(serving: Serving) -> None:
    impostor = serving.endpoint._replace(key="00" * 32)
    assert impostor.join(member(0)) is None
    with Stranger(serving.endpoint) as stranger:
        stranger.challenge("a nonce")
        stranger.say(Join(member(0), "00" * 32))
        assert stranger.hear() == b""
    assert serving.joined == {}
    serving.join(0).close()


def test_what_a_rank_has_said_is_of_no_use_to_others(said: list[bytes], serving: Serving) -> None:
    hello, _, join, _ = said
    for recorded in (join, join.replace(b"[[0,", b"[[1,")):
        with Stranger(serving.endpoint) as stranger:
            stranger.socket.sendall(hello)
            assert stranger.hear().startswith(b'["Challenge"')
            stranger.socket.sendall(recorded)
            assert stranger.hear() == b""
    assert [*serving.joined] == [member(0)]


@pytest.mark.parametrize(
    "other", [member(0), member(2), member(1, "stdout"), member((1 << 53) - 1)]
)
def test_nobody_joins_as_a_rank_that_has_joined_or_that_there_is_not(
    other: Member, serving: Serving
) -> None:
    first = serving.join(0)
    until(lambda: serving.joined)
    with Stranger(serving.endpoint) as twin:
        assert twin.join(serving.endpoint.key, other) == b""
    serving.joined[member(0)].send(End(7, ""))
    assert receive(first) == [End(7, "")]
    with Stranger(serving.endpoint) as rank:
        assert rank.join(serving.endpoint.key, member(1)) == encode(Welcome())
    until(lambda: [*serving.joined] == [member(0), member(1)])
    first.close()


def test_proof_of_one_member_is_none_of_another(serving: Serving) -> None:
    with Stranger(serving.endpoint) as rank:
        challenge = rank.challenge("a nonce")
        answer = rank.answer_to(challenge, serving.endpoint.key, member(0))
        rank.say(Join(member(1), answer))
        assert rank.hear() == b""


def test_listener_does_not_prove_what_ranks_have_to(serving: Serving) -> None:
    """The listener's own proof, sent back to it, does not pass for a rank's."""
    with Stranger(serving.endpoint) as mirror:
        challenge = mirror.challenge("a nonce")
        mirror.say(Join(member(0), challenge.proof))
        assert mirror.hear() == b""


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\n",
        b"x" * 5000,
        encode(Tick()),
        encode(Join(member(0), "00" * 32)),
        encode(Hello("a")) + encode(Hello("b")),
        encode(Hello("a" * 5000)),
        encode(Hello("\ud800")) + encode(Join(member(0), "\ud800\xff")),
        b"[" * 4000 + b"\n",
    ],
    ids=lambda words: repr(words[:40]),
)
def test_stranger_who_says_something_else(words: bytes, serving: Serving) -> None:
    with Stranger(serving.endpoint) as stranger:
        stranger.socket.sendall(words)
        for _ in range(3):  # at most one challenge comes before the end
            if not (heard := stranger.hear()):
                break
        assert heard == b""
    serving.join(0).close()


@pytest.mark.parametrize("words", [b"", b"[", encode(Hello("a"))])
def test_stranger_who_stays_is_dropped_after_a_while(words: bytes, stepping: Stepping) -> None:
    with Stranger(stepping.endpoint) as stranger:
        assert select.select([stepping.listener], [], [], TIMEOUT)[0]
        stepping.step()
        stranger.socket.sendall(words)
        until(stranger.has_been_delivered)
        if words.endswith(b"\n"):
            stepping.answer(stranger)
        stepping.step(4.9)
        assert with_news([stranger]) == []
        stepping.step(5.1)
        assert stranger.hear() == b""


def test_oldest_strangers_make_room(stepping: Stepping) -> None:
    with ExitStack() as stack:
        crowd = [stack.enter_context(Stranger(stepping.endpoint)) for _ in range(80)]
        until(lambda: stepping.step() or len(with_news(crowd)) == 16)
        for stranger in crowd[:16]:
            assert stranger.hear() == b""
        assert with_news(crowd[16:]) == []
        for number, rank in enumerate(crowd[16:18]):
            stepping.join(rank, stepping.answer(rank, Hello("a nonce")), number)
        for stranger in crowd[18:]:  # all ranks have joined
            assert stranger.hear() == b""


def test_flood_of_connections_does_not_keep_out_who_speaks(stepping: Stepping) -> None:
    with Stranger(stepping.endpoint) as rank:
        stepping.connect(63)
        stepping.step()
        stepping.connect(64)
        rank.say(Hello("a nonce"))  # at the last moment
        until(rank.has_been_delivered)
        stepping.step()
        for _ in range(3):
            stepping.connect(64)
            stepping.step()
        stepping.join(rank, rank.hear())


@pytest.mark.parametrize("words", [b"", encode(Hello("a nonce"))], ids=["silent", "Hello"])
def test_flood_from_elsewhere_does_not_keep_out_a_rank(words: bytes, stepping: Stepping) -> None:
    with Stranger(stepping.endpoint) as rank:
        challenge = stepping.answer(rank, Hello("a nonce")) if words else b""
        stepping.step()
        for _ in range(4):
            stepping.connect(50, "127.0.0.9", words)
            stepping.step()
            stepping.step()
        stepping.join(rank, challenge or stepping.answer(rank, Hello("a nonce")))


def test_there_is_room_for_all_ranks_at_all_addresses() -> None:
    with ExitStack() as stack:
        stepping = Stepping(stack, 100, [f"127.0.0.{number}" for number in range(1, 4)])
        places = [stepping.endpoint._replace(addresses=[it]) for it in stepping.endpoint.addresses]
        crowd = [stack.enter_context(Stranger(place)) for place in places for _ in range(100)]
        for stranger in crowd:
            stranger.say(Hello("a nonce"))
        until(lambda: stepping.step() or len(with_news(crowd)) == 300)
        assert all(stranger.hear().startswith(b'["Challenge"') for stranger in crowd)


# ---- strangers who listen ----


@contextmanager
def answering(answer: Callable[[Channel, Hello], Any]) -> Iterator[Address]:
    """Listen, and answer the first words of one rank."""

    def run() -> None:
        connection, _ = listening.accept()
        with connection:
            selector = selectors.DefaultSelector()
            selector.register(connection, selectors.EVENT_READ)
            channel = Channel(connection)
            while not (messages := channel.receive([Hello])):
                assert selector.select(TIMEOUT)
            (hello,) = messages
            assert isinstance(hello, Hello)
            answer(channel, hello)
            while selector.select(TIMEOUT):
                try:
                    said.extend(channel.receive([Hello, Join]))
                except ConnectionError:
                    break
            selector.close()

    said: list[Message] = []
    (listening,) = listen(["127.0.0.2"])
    thread = threading.Thread(target=run)
    thread.start()
    with listening:
        yield Endpoint.of([listening]).addresses[0]
        thread.join(TIMEOUT)
    assert said == []


@pytest.mark.parametrize(
    "answer",
    [
        lambda channel, hello: None,
        lambda channel, hello: channel.send_encoded(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        lambda channel, hello: channel.send_encoded(b"[" * (1 << 16)),
        lambda channel, hello: channel.send(hello),
        lambda channel, hello: channel.send(Challenge("a nonce", "00" * 32)),
        lambda channel, hello: channel.send(Tick()),
    ],
    ids=["nothing", "HTTP", "too much", "an echo", "a wrong proof", "another message"],
)
def test_rank_tells_nothing_to_a_stranger_who_listens(answer: Any, serving: Serving) -> None:
    with answering(answer) as strange:
        places = [strange, *serving.endpoint.addresses]
        channel = Endpoint(places, serving.endpoint.key).join(member(0))
        assert channel is not None
        channel.close()


def test_nobody_can_pass_on_what_a_listener_says(serving: Serving) -> None:
    """A stranger at another address asks the listener for its proof, and shows it to the rank."""

    def relay(channel: Channel, hello: Hello) -> None:
        with Stranger(serving.endpoint) as stranger:
            channel.send(stranger.challenge(hello.nonce))

    with answering(relay) as strange:
        assert Endpoint([strange], serving.endpoint.key).join(member(0)) is None


# ---- any words ----


def test_any_words(serving: Serving) -> None:
    assert visit(serving.endpoint.addresses[0], 300) == 0
    assert serving.joined == {}
    serving.join(0).close()
    serving.join(1).close()
    until(lambda: is_refused(serving.endpoint))
