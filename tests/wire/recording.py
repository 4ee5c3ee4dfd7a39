"""Record what workers of this release send, for tests of later ones: `python -m tests.wire.recording` writes frames/.

The folder of a protocol version has a file for each direction of each TCP connection: the bytes behind the handshake,
and their meaning as text. Until that version is released, the folder is removed and written anew when something
changes. Afterwards it never changes: workers of that release go on sending these bytes. Recorded frames name the
functions and classes of this module, so these stay as well.
"""

import contextlib
import importlib
import json
import operator
import pathlib
import pickle
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from telegrad import autograd, errors, rpc
from telegrad._core.agent.agent import Agent
from telegrad._core.membership.generations import Arrival, Before, Formed
from telegrad._core.membership.members import Devices, Member
from telegrad._core.pickling.exceptions import rebuild
from telegrad._core.pickling.function_names import resolve
from telegrad._core.pickling.pickling import decode
from telegrad._core.security.handshake import PROTOCOL, Acceptor, Hello, Initiator, StreamId, VersionRange
from telegrad._core.security.keyring import Keyring
from telegrad._core.transport.link import Link
from telegrad._core.wire.messages import (
    CALL,
    FAILURE,
    HAS_CALL_CONTEXT,
    HAS_GRAPH,
    HAS_REFERENCES,
    KINDS,
    NOTICE,
    RESULT,
    FrameReader,
    Message,
    split,
)
from telegrad._core.wire.packing import unpack
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.weights import Publisher, Subscriber
from tests.cluster import agents

FOLDER = pathlib.Path(__file__).with_name("frames")
KEY = "the key of the group"
INCARNATIONS = {"w0": "0" * 16, "w1": "1" * 16}

Streams = dict[str, bytearray]


# The calls of the workers


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, number: int) -> int:
        self.value += number
        return self.value


def count(upto: int) -> Iterator[int]:
    yield from range(upto)


def nothing(*args: Any) -> None:
    """Accept any arguments."""


kept: list[Any] = []


def offer() -> None:
    """Publish a value, and weights."""
    rpc.publish("counter", Counter10)
    kept.append(Publisher("policy", lambda: {"weight": torch.arange(3.0), "step": 4}))
    kept[-1].publish()


def Counter10() -> Counter:  # noqa: N802 - as a class
    return Counter(10)


def plain() -> None:
    """Make calls and references, which involve no worker but the callee."""
    rpc.rpc_sync("w1", operator.add, (2, 3))
    rpc.rpc_sync("w1", sorted, ([3, 1, 2],), {"reverse": True})
    rpc.rpc_sync("w1", torch.add, (torch.ones(2, 2), torch.arange(2)), {"alpha": 2})
    rpc.rpc_sync("w1", torch.sum, (torch.ones(12_500),))  # more than a description has room for
    rpc.rpc_sync("w1", torch.neg, (torch.arange(6.0).reshape(2, 3).t(),))
    rpc.rpc_sync("w1", dict, (), {"text": "\u00e4", "bytes": b"\0", "nested": {"a": (1, [None, 2.5j])}})
    rpc.rpc_sync("w1", nothing, (torch.float16, rpc.WorkerInfo("w1", 1), slice(1, 2)))
    with torch.no_grad():
        rpc.rpc_sync("w1", torch.is_grad_enabled)
    with torch.autocast("cpu", torch.bfloat16):
        rpc.rpc_sync("w1", torch.is_autocast_enabled, ("cpu",))
    for error in (operator.truediv, torch.cat):
        with contextlib.suppress(Exception):
            rpc.rpc_sync("w1", error, [1, 0])
    ones = rpc.remote("w1", torch.ones, (3,))
    ones.to_here()
    ones.rpc_sync().sum()
    rpc.rpc_sync("w1", operator.is_, (ones, ones))
    counter = rpc.remote("w1", Counter, (5,))
    counter.rpc_sync().add(2)
    counter.remote().add(3).to_here()


def training() -> None:
    """Run one step of distributed autograd."""
    weight = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        remote = rpc.remote("w1", torch.mul, (weight, 2.0))
        autograd.backward(context_id, [torch.add(remote.to_here(), rpc.rpc_sync("w1", torch.exp, (weight,))).sum()])
        autograd.get_gradients(context_id)


def more() -> None:
    """Use streams, groups, and calls that are retried."""
    list(rpc.rpc_stream("w1", count, (3,)))
    everybody = rpc.group()
    everybody.rpc_sync(operator.add, (1, 2))
    everybody.without("w0").remote(Counter, (1,)).rpc_sync().add(4)
    rpc.rpc_sync("w1", operator.add, (1, 2), idempotent=True)
    with contextlib.suppress(errors.CallTimeout):
        rpc.rpc_sync("w1", operator.add, (1, 2), timeout=20.0, wait_for_worker=True)
    rpc.rpc_sync("w1", offer)
    rpc.lookup("counter").rpc_sync().add(1)
    reader = Subscriber("w1", "policy")
    reader.newest()
    reader.close()


STORIES: dict[str, Callable[[], None]] = {each.__name__: each for each in (plain, training, more)}


# Recording


@contextlib.contextmanager
def overheard() -> Iterator[Streams]:
    """Record the bytes that arrive at the workers which are started inside."""
    streams: Streams = {}
    links: dict[int, Link] = {}  # keyed by the id of their reader
    begin, advance = Link.__init__, FrameReader.advance

    def noted(link: Link, *args: Any, **kwargs: Any) -> None:
        begin(link, *args, **kwargs)
        links[id(link.reader)] = link

    def heard(reader: FrameReader, count: int, data: bytes | None = None) -> Any:
        link = links.get(id(reader))
        if link is not None:
            name = f"{'calls' if link.prompt else 'answers'}-of-{link.peer}"
            streams.setdefault(name, bytearray()).extend(reader.buffer()[:count] if data is None else data)
        return advance(reader, count, data)

    with patch.object(Link, "__init__", noted), patch.object(FrameReader, "advance", heard):
        yield streams


@contextlib.contextmanager
def two_workers(**options: Any) -> Iterator[list[Worker]]:
    """Start two workers with fixed incarnations; the current worker of this thread is the first."""
    begin = Agent.__init__

    def begun(agent: Agent, name: str, *args: Any) -> None:
        begin(agent, name, *args)
        agent.incarnation = INCARNATIONS[name]

    with (
        patch.object(Agent, "__init__", begun),
        patch("telegrad._core.rpc.cluster.host_identity", lambda: "host"),
        agents(2, transport="tcp", key=KEY, **options) as workers,
    ):
        current.enter(workers[0])
        try:
            yield workers
        finally:
            current.enter(None)


@contextlib.contextmanager
def reading() -> Iterator[Agent]:
    """Return an agent that knows all kinds of messages: some parts register theirs at their first use."""
    with two_workers() as workers:
        more()
        yield workers[0].agent


def record(story: Callable[[], None]) -> Streams:
    with overheard() as streams, two_workers():
        story()
    return streams


def ends(spoken: VersionRange = PROTOCOL) -> tuple[Initiator, Acceptor]:
    """Return both ends of the recorded handshake."""
    a, b = (Hello(name, rank, INCARNATIONS[name], "program") for rank, name in enumerate(INCARNATIONS))
    keys, stream_id = Keyring([KEY.encode()]), StreamId("connection", 1)
    return (
        Initiator(keys, a, b.incarnation, stream_id=stream_id, random=lambda size: b"a" * size, spoken=spoken),
        Acceptor(keys, b, random=lambda size: b"b" * size, spoken=spoken),
    )


def handshake() -> list[str]:
    """Return the messages of both ends, in turn."""
    a, b = ends()
    said = [a.start()]
    for end in (b, a, b, a, b):
        said.append(end.receive(said[-1]))
    return [data.hex() for data in said]


def entries() -> dict[str, str]:
    """Return the entries of a store and of a directory."""
    devices = Devices(1, {"w1": {"cuda:0": "cuda:0"}}, ("cuda:0",))
    member = Member("w0", 0, INCARNATIONS["w0"], "program", "host", "socket", ("127.0.0.1", 29500), devices, "actor")
    return {
        "member": member.to_json(),
        "arrival": Arrival(member, Before(1, "group", ("gone",), member.incarnation), "2 to 4").to_json(),
        "formed": Formed(2, (member,), 1, "2 to 4").to_json(),
    }


# Reading


def messages(stream: bytes) -> list[Message]:
    """Return the frames of a stream; their blobs are bytes."""

    def allocate(size: int, device: int, striped: bool) -> tuple[torch.Tensor, Iterator[memoryview]]:
        assert not striped
        memory = torch.empty(size, dtype=torch.uint8)
        return memory, iter([memoryview(memory.numpy())])  # type: ignore[arg-type]

    def refuse(*_: object) -> Any:
        raise AssertionError("over TCP nothing is lent")

    reader, at = FrameReader(allocate, refuse, lambda _: False), 0
    found: list[Message] = []
    while at < len(stream):
        buffer = reader.buffer()
        count = min(len(buffer), len(stream) - at)
        buffer[:count] = stream[at : at + count]
        found += reader.advance(count)
        at += count
    return found


def meaning(message: Message, agent: Agent) -> str:
    """Return a message as one line, decoded with the kinds that `agent` knows."""
    body: Any = message.body
    carried: list[Any] = []
    if message.flags & HAS_REFERENCES:  # the last attachment comes first
        body, behind = split(body)
        carried.append(pickle.loads(behind))
    if message.flags & HAS_GRAPH:
        body, behind = split(body)
        carried.append(struct.unpack_from("<QQ", behind))  # the id of the context and the number of the message
    if message.kind == CALL and message.flags & HAS_CALL_CONTEXT:
        body, behind = split(body)
        carried.append(pickle.loads(behind))
    tensors = unpack(message.meta, list(message.blobs)) if message.meta else []
    slots = [f"reference {number}" for number in range(99)]
    value: Any = bytes(body)
    if message.kind == CALL:
        value = decode(body, tensors, slots)
        if message.head:
            assert callable(resolve(message.head.decode()))
    elif message.kind == RESULT:
        value = decode(body, tensors, slots) if body else None
    elif message.kind == FAILURE:
        value = repr(rebuild(body)).splitlines()[0]
    elif message.kind == NOTICE:
        name, *fields = pickle.loads(body)
        value = agent._server.handlers._of[name][0](*fields), tensors
    line = f"{KINDS[message.kind]} {message.id} {message.flags} {message.head.decode()} {value!r} {carried!r}"
    return re.sub(r" at 0x\w+|\s+", lambda found: " " if found[0].isspace() else "", line)


def write(folder: pathlib.Path, agent: Agent) -> None:
    folder.mkdir(parents=True)  # an existing recording is not overwritten
    (folder / "handshake.json").write_text(json.dumps(handshake(), indent=1) + "\n")
    (folder / "store.json").write_text(json.dumps(entries(), indent=1) + "\n")
    for name, story in STORIES.items():
        for stream, content in record(story).items():
            (folder / f"{name}-{stream}.bin").write_bytes(content)
            lines = [f"{meaning(message, agent)}\n" for message in messages(bytes(content))]
            (folder / f"{name}-{stream}.txt").write_text("".join(lines))


if __name__ == "__main__":
    recording = importlib.import_module("tests.wire.recording")  # frames must not name functions of `__main__`
    with recording.reading() as agent:
        recording.write(recording.FOLDER / str(PROTOCOL.newest), agent)
