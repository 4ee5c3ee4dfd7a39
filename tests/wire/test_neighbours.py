"""Workers understand those of neighbouring releases, whose recorded frames are in frames/."""

import json
import pathlib
from collections.abc import Callable, Iterator

import pytest

from telegrad._core.agent.agent import Agent
from telegrad._core.membership.generations import Arrival, Formed
from telegrad._core.membership.members import Member
from telegrad._core.security.handshake import PROTOCOL, Hello, Initiator, VersionRange
from telegrad._core.wire.messages import FAILURE, PREFIX, Message
from tests.strangers.door import Visitor, knock
from tests.wire import recording
from tests.wire.recording import FOLDER, INCARNATIONS, ends, meaning, messages

RELEASES = sorted(int(folder.name) for folder in FOLDER.iterdir())
FIRST = 8  # the first version that was ever released
STREAMS = sorted(FOLDER.rglob("*.bin"))


@pytest.fixture(scope="module")
def reader() -> Iterator[Agent]:
    with recording.reading() as agent:
        yield agent


def test_each_supported_version_was_recorded() -> None:
    assert list(range(PROTOCOL.oldest, PROTOCOL.newest + 1)) == RELEASES, (
        "before a release: python -m tests.wire.recording; what is not spoken any more can go"
    )
    assert PROTOCOL.newest in (FIRST, PROTOCOL.oldest + 1), "two neighbours speak to each other"


@pytest.mark.parametrize("stream", STREAMS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recorded_frames_decode_to_their_recorded_meaning(stream: pathlib.Path, reader: Agent) -> None:
    found = [meaning(message, reader) for message in messages(stream.read_bytes())]
    assert found == stream.with_suffix(".txt").read_text().splitlines()


@pytest.mark.parametrize("version", RELEASES)
def test_an_older_handshake_is_understood(version: int) -> None:
    said = [bytes.fromhex(data) for data in json.loads((FOLDER / str(version) / "handshake.json").read_text())]
    a, b = ends(VersionRange(version, version))
    assert a.start() == said[0]
    for end, heard, answer in zip([b, a, b, a, b], said[:-1], said[1:], strict=True):
        assert end.receive(heard) == answer
    assert a.receive(said[-1]) == b""
    assert (a.done, b.done, a.version, b.version) == (True, True, version, version)


@pytest.mark.parametrize("version", RELEASES)
def test_an_older_store_is_understood(version: int) -> None:
    entries = json.loads((FOLDER / str(version) / "store.json").read_text())
    member = Member.from_json(entries["member"])
    assert member[:3] == ("w0", 0, INCARNATIONS["w0"])
    assert (member.tcp, member.role, member.devices.maps) == (
        ("127.0.0.1", 29500),
        "actor",
        {"w1": {"cuda:0": "cuda:0"}},
    )
    assert Arrival.from_json(entries["arrival"]).member == member
    assert Formed.from_json(entries["formed"]) == (2, (member,), 1, "2 to 4", False, "")


@pytest.mark.parametrize(
    ("kind", "read"), [("member", Member.from_json), ("arrival", Arrival.from_json), ("formed", Formed.from_json)]
)
def test_fields_that_a_later_version_adds_to_an_entry_are_ignored(kind: str, read: Callable[[str], object]) -> None:
    entry = recording.entries()[kind]
    assert read(json.dumps([*json.loads(entry), "more"])) == read(entry)


@pytest.mark.parametrize(
    ("version", "newest"), [*((each, each) for each in RELEASES), (PROTOCOL.newest, PROTOCOL.newest + 1)]
)
def test_recorded_calls_get_the_recorded_answers(version: int, newest: int) -> None:
    """The caller supports its own version alone, or the next one, too."""
    folder = FOLDER / str(version)
    calls = (folder / "plain-calls-of-w0.bin").read_bytes()[: -PREFIX.size]  # without its goodbye
    wanted = messages((folder / "plain-answers-of-w1.bin").read_bytes())
    # A single thread serves the calls in their order, since they increment one counter.
    with recording.two_workers(num_worker_threads=1) as workers, knock(workers[1]) as sock:
        me = Hello("w0", 0, INCARNATIONS["w0"], "another program")
        end = Initiator(workers[1].agent.keys, me, INCARNATIONS["w1"], spoken=VersionRange(version, newest))
        visitor = Visitor(sock, end)
        visitor.say(calls)
        said = [in_short(answer, workers[0].agent) for answer in hear(visitor, len(wanted))]
        assert sorted(said) == sorted(in_short(answer, workers[0].agent) for answer in wanted)


def hear(visitor: Visitor, count: int) -> list[Message]:
    heard = b""
    found: list[Message] = []
    while len(found) < count:
        data = visitor.hear()
        assert data, "the worker closed the connection"
        heard += data
        found = messages(heard)
    return found


def in_short(answer: Message, agent: Agent) -> str:
    """Describe an answer without the text of an error, which depends on the code that raises it."""
    line = meaning(answer, agent)
    return line.partition("(")[0].replace('"', "'") if answer.kind == FAILURE else line
