"""An attacker on the network, who reads and changes all bytes, cannot have a forged frame accepted."""

import contextlib
import itertools
import operator
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad._core.security.handshake import Acceptor, Hello, Initiator
from telegrad._core.security.keyring import Keyring
from telegrad._core.security.noise import RECORD, Ciphers, CipherState, RecordWriter
from telegrad._core.transport.connect import Target, connect
from telegrad._core.transport.poller import wait_readable
from telegrad._core.wire.messages import CALL, REFUSAL, RESULT, Message, encode
from telegrad._core.worker.current import Worker
from telegrad.errors import AuthenticationFailed, PeerLost, VersionMismatch
from tests.cluster import agents, in_background
from tests.links import LinkEnd
from tests.strangers.door import Visitor, knock, wait_closed
from tests.wire.recording import messages

KEY = b"the key of the group"
RING = Keyring([KEY])
A, B = Hello("w0", 0, "incarnation of a", ""), Hello("w1", 1, "incarnation of b", "")
ran: list[Any] = []


def run(value: Any) -> Any:
    ran.append(value)
    return value


# Links whose bytes pass through an attacker


def agreed() -> tuple[Ciphers, Ciphers]:
    """Return the ciphers of both ends, after an attacker has forwarded their handshake unchanged."""
    a, b = Initiator(RING, A, B.incarnation), Acceptor(RING, B)
    said = a.start()
    for end in (b, a, b, a, b, a):
        said = end.receive(said)
    assert a.ciphers is not None
    assert b.ciphers is not None
    return a.ciphers, b.ciphers


class End(LinkEnd):
    """A link, and the attacker's end of its socket."""

    def said(self) -> bytes:
        """Return the bytes that the link has sent."""
        heard = b""
        while wait_readable(self.theirs, 0.0):
            heard += self.theirs.recv(1 << 20)
        return heard

    def hear(self, stream: bytes) -> None:
        self.theirs.sendall(stream)
        while self.link.closed is None and self.link.read():
            pass


@contextlib.contextmanager
def two_ends() -> Iterator[tuple[End, End]]:
    with contextlib.ExitStack() as stack:
        here, there = (stack.enter_context(contextlib.closing(End(ciphers=each))) for each in agreed())
        yield here, there


def sent(end: End, count: int) -> list[bytes]:
    """Send `count` frames; return the record of each."""
    found = []
    for number in range(count):
        end.link.send(Message(CALL, number + 1, body=b"frame %d" % number))
        found.append(end.said())
    return found


ALTER, INJECT, PLAIN, REFLECT, CUT = range(5)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.data())
def test_only_sent_frames_are_accepted_in_order_and_once(count: int, data: st.DataObject) -> None:
    with two_ends() as (a, b):
        records, own = sent(a, count), sent(b, 1)
        order = data.draw(st.lists(st.integers(0, count - 1), max_size=7), "which are passed on")
        stream = [records[number] for number in order]
        if data.draw(st.booleans(), "whether something else is done, too"):
            place = data.draw(st.integers(0, len(stream)))
            kind = data.draw(st.integers(0, 4))
            if kind == ALTER and stream:
                record = bytearray(stream[place % len(stream)])
                record[data.draw(st.integers(0, len(record) - 1))] ^= data.draw(st.integers(1, 255))
                stream[place % len(stream)] = bytes(record)
            elif kind == INJECT:
                stream.insert(place, data.draw(st.binary(min_size=1, max_size=80)))
            elif kind == PLAIN:
                stream.insert(place, encode(Message(CALL, 99, body=b"of the attacker")))
            elif kind == REFLECT:
                stream.insert(place, own[0])
            elif stream:
                stream[place % len(stream)] = stream[place % len(stream)][: data.draw(st.integers(0, 40))]
        b.hear(b"".join(stream))
        accepted = [bytes(frame.body) for frame in b.frames]
        assert accepted == [b"frame %d" % number for number in range(len(accepted))]
        untouched = itertools.takewhile(b"".join(stream).startswith, itertools.accumulate(records))
        assert len(accepted) <= len(list(untouched))
        if b.link.closed is not None:
            assert "altered on the way" in str(b.link.closed) or "an invalid record" in str(b.link.closed)


def test_a_record_with_any_flipped_bit_is_refused() -> None:
    here, there = agreed()
    with contextlib.closing(End(ciphers=here)) as a:
        (record,) = sent(a, 1)
    for bit in range(8 * len(record)):
        altered = bytearray(record)
        altered[bit // 8] ^= 1 << bit % 8
        again = there._replace(receiving=CipherState(there.receiving._key))
        with contextlib.closing(End(ciphers=again)) as b:
            b.hear(bytes(altered) + bytes(300))  # completes a record whose length was increased
            assert not b.frames, f"bit {bit}"


def test_a_large_frame_arrives_in_any_pieces() -> None:
    with two_ends() as (a, b):
        body = os.urandom(RECORD + 5)
        with in_background(a.link.send, Message(CALL, 1, body=body)):
            heard = 0
            while not b.frames:
                a.link.on_writable()
                piece = a.theirs.recv(70_001)
                heard += len(piece)
                b.hear(piece)
        assert bytes(b.frames[0].body) == body


shapes = st.tuples(st.sampled_from([0, 1, 300, 5000, 40_000]), st.lists(st.sampled_from([1, 300, 40_000]), max_size=2))


@settings(deadline=None, max_examples=20)
@given(
    st.lists(shapes, min_size=1, max_size=5), st.lists(st.sampled_from([1, 30, 3000, 70_000]), min_size=1, max_size=4)
)
def test_frames_with_tensors_arrive_in_any_pieces(sizes: list[Any], cuts: list[int]) -> None:
    """A frame may fill a record, begin inside of it, or continue in the next one."""
    with two_ends() as (a, b):
        said, sent = b"", []
        for number, (size, tensors) in enumerate(sizes):
            body, blobs = bytes([number]) * size, [torch.full((each,), number, dtype=torch.uint8) for each in tensors]
            a.link.send(Message(CALL, number, body=body, blobs=blobs))
            said += a.said()
            sent.append((body, [bytes(blob.tolist()) for blob in blobs]))
        at = 0
        for cut in itertools.chain(cuts * 20, itertools.repeat(100_000)):
            if at >= len(said):
                break
            b.hear(said[at : at + cut])
            at += cut
        assert [(bytes(each.body), [bytes(blob.tolist()) for blob in each.blobs]) for each in b.frames] == sent


def test_small_frames_that_wait_for_the_socket_keep_their_order() -> None:
    with two_ends() as (a, b):
        for number in range(2000):
            a.link.send(Message(CALL, number, body=bytes(1000)))
        assert a.link.is_sending
        while len(b.frames) < 2000:
            a.link.on_writable()
            b.hear(a.theirs.recv(100_000))
        assert not a.link.is_sending
        assert [frame.id for frame in b.frames] == list(range(2000))


def test_an_interrupt_while_records_are_made_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the sent part of the outbox were unknown, and might be sent twice or never."""
    true, calls = RecordWriter.add, itertools.count()

    def interrupted(writer: RecordWriter, data: bytes) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        true(writer, data)

    with two_ends() as (a, b):
        monkeypatch.setattr(RecordWriter, "add", interrupted)
        interrupts = 0
        try:
            a.link.send(Message(CALL, 1, body=bytes(4 * RECORD)))
        except KeyboardInterrupt:
            interrupts += 1
        while data := a.theirs.recv(1 << 20):
            b.link.feed(data)
            try:
                a.link.on_writable()
            except KeyboardInterrupt:
                interrupts += 1
        assert (interrupts, b.frames) == (1, [])
        assert not a.link.is_sending


# A worker, and an attacker between it and another member


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    with agents(2, transport="tcp", key="the key of the group") as made:
        yield made


class Relay:
    """Forwards bytes between a member and a worker, and records those of the member."""

    def __init__(self, worker: Worker) -> None:
        self.heard: list[bytes] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address, self.far = self._door.getsockname(), knock(worker)
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        self.near, _ = self._door.accept()
        back = threading.Thread(target=self._pass_on, args=(self.far, self.near, lambda _: None))
        back.start()
        self._pass_on(self.near, self.far, self.heard.append)
        back.join()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, note: Callable[[bytes], None]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                note(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in (self._door, self.near, self.far):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._threads[0].join()


def call(number: int, value: str) -> bytes:
    """Return the frame of a call of `run`."""
    return encode(Message(CALL, number, head=b"tests.transport.test_attacks:run", body=pickle.dumps(((value,), {}))))


@pytest.mark.parametrize("attack", ["plain frame", "replay", "altered", "reflection"])
def test_relaying_a_handshake_does_not_let_the_relay_in(workers: list[Worker], attack: str) -> None:
    ran.clear()
    _, b = workers
    with contextlib.closing(Relay(b)) as relay:
        channel = connect(Target("w1", b.agent.incarnation, "", relay.address), b.agent.keys, A, None, "tcp", 10.0, 0.0)
        assert channel.ciphers is not None
        writer = RecordWriter(channel.ciphers.sending)
        channel.sock.settimeout(10.0)
        channel.sock.sendall(writer.encrypt(call(1, "of the member")))
        answer = channel.sock.recv(4096)
        record = relay.heard[-1]
        relay.far.sendall(
            {
                "plain frame": call(2, "of the attacker"),
                "replay": record,
                "altered": bytes([*record[:30], record[30] ^ 1, *record[31:]]),
                "reflection": answer,
            }[attack]
        )
        assert wait_closed(channel.sock) == b""
        channel.sock.close()
    assert ran == ["of the member"]
    assert workers[0].agent.call("w1", operator.add, (1, 2), None) == 3


def test_a_tampered_answer_is_an_error_for_the_caller(workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = workers
    sending = RecordWriter.encrypt

    def alter(writer: RecordWriter, data: bytes) -> bytes:
        record = sending(writer, data)
        return record[:-1] + bytes([record[-1] ^ 1]) if data[:1] == bytes([RESULT]) else record

    assert a.agent.call("w1", operator.add, (1, 2), None) == 3
    with monkeypatch.context() as patched:
        patched.setattr(RecordWriter, "encrypt", alter)
        with pytest.raises(PeerLost, match="altered on the way"):
            a.agent.call("w1", operator.add, (1, 2), None)
    assert a.agent.call("w1", operator.add, (1, 2), None) == 3  # over a new connection


def test_calls_over_tcp_are_encrypted(workers: list[Worker]) -> None:
    _, b = workers
    me = A._replace(name="a-name-too-long-to-occur-by-chance")
    with contextlib.closing(Relay(b)) as relay:
        target = Target("w1", b.agent.incarnation, "", relay.address)
        channel = connect(target, b.agent.keys, me, None, "tcp", 10.0, 0.0)
        assert channel.ciphers is not None
        channel.sock.sendall(RecordWriter(channel.ciphers.sending).encrypt(call(1, "a secret")))
        channel.sock.recv(4096)
        heard = b"".join(relay.heard)
        channel.sock.close()
    for text in (b"a secret", b"test_attacks", me.name.encode(), b.agent.incarnation.encode()):
        assert text not in heard


def test_the_next_key_is_tried_by_a_new_connection(workers: list[Worker]) -> None:
    _, b = workers
    target = Target("w1", b.agent.incarnation, "", b.agent.me.tcp)
    connect(target, Keyring([b"a newer key", KEY]).within(b.agent.keys.group), A, None, "tcp", 10.0, 0.0).sock.close()
    with pytest.raises(AuthenticationFailed, match="TELEGRAD_KEY"):
        connect(target, Keyring([b"a newer key", b"another"]), A, None, "tcp", 10.0, 0.0)


# Frames of unknown kinds


def test_a_request_of_an_unknown_kind_is_refused_and_others_are_served(workers: list[Worker]) -> None:
    _, b = workers
    with knock(b) as sock:
        visitor = Visitor(sock, Initiator(b.agent.keys, A._replace(incarnation="x"), b.agent.incarnation))
        visitor.say(encode(Message(40, 7)) + call(8, "after it"))
        heard = b""
        while len(found := messages(heard)) < 2:
            heard += visitor.hear()
    refused = next(each for each in found if each.kind == REFUSAL)
    assert refused.id == 7
    assert b"install the same telegrad" in refused.head
    assert {each.id for each in found if each.kind == RESULT} == {8}


@pytest.mark.parametrize("kind", [0, RESULT, REFUSAL, 40], ids=str)
def test_a_frame_that_is_not_a_request_closes_the_connection(workers: list[Worker], kind: int) -> None:
    _, b = workers
    with knock(b) as sock:
        visitor = Visitor(sock, Initiator(b.agent.keys, A._replace(incarnation="x"), b.agent.incarnation))
        visitor.say(encode(Message(kind, 7 if kind != 40 else 0)))
        assert visitor.hear() == b""


def test_a_call_of_a_newer_worker_ends_with_an_error_that_says_so(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = workers
    with monkeypatch.context() as patched:
        patched.setattr("telegrad._core.agent.pending_call.CALL", 40)
        with pytest.raises(VersionMismatch, match=r"'w1' did not run .* install the same telegrad"):
            a.agent.call("w1", operator.add, (1, 2), None)
        patched.undo()
        patched.setattr("telegrad._core.agent.incoming.RESULT", 41)
        with pytest.raises(PeerLost, match="kind 41, which this version does not know"):
            a.agent.call("w1", operator.add, (1, 2), None)
