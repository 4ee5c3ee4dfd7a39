"""Calls to a worker while another caller floods it: `python -m benchmarks.floods [ways] [--seconds N] [--rounds N]`.

For each kind of flood, measures the p99 of two callers that make sequential calls, in three states of a third caller:
idle, using a processor without sending (the cost of the machine itself), and flooding. The flood is written directly
to the socket, so the sender's limits do not apply. Also prints the callee's growth in memory and descriptors, with the
limits of docs/security.md. `--check` exits with status 1 if a figure is above its limit, if a p99 is more than
`--ratio` times the p99 beside an idle caller, or if a flood did not use the descriptors that it should use.
"""

from __future__ import annotations

import argparse
import itertools
import operator
import os
import pickle
import select
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from benchmarks.command import run
from benchmarks.groups import join
from benchmarks.measuring import MB, TELEGRAD
from benchmarks.processes import Child, answer_all, children_killed, free_port
from telegrad._core import processes as descriptors
from telegrad._core.sockets import NOT_NOW
from telegrad._core.streams.generator_runs import Producer
from telegrad._core.transport.link import Link
from telegrad._core.wire.messages import CALL, HAS_REFERENCES, Message, append, encode
from telegrad._core.worker import current

CALLEE, FLOODER, CALLERS = 0, 1, (2, 3)
PATIENCE = 120.0
WARM = 0.3  # seconds of flooding before the callers are timed
BATCH = 64  # frames per write
FIRST = 1 << 20  # first call id, beyond those of the flooder's own calls
RESULT = 10 * MB
KEPT = 1 << 15  # elements of a 128 KB tensor, which is sent in lent memory, unlike bytes of that size
RATIO = 3.0  # maximum ratio of the p99 beside a flood to that beside an idle caller
LENT = descriptors.files_to_lend()  # descriptors of memory lent to one worker: half of the files, two each

Frames = Iterator[bytes]


class Way(NamedTuple):
    """A kind of flood."""

    about: str
    frames: Callable[[], Frames]
    memory: int  # maximum growth of the callee in MB
    descriptors: int = 64
    least: int = 0  # minimum growth in descriptors; below it, the flood did not work
    reads: bool = True  # whether the flooder reads results


def _calls(function: str, *args: Any) -> Frames:
    head, body = function.encode(), pickle.dumps((args, {}), 5)
    for number in itertools.count(FIRST):
        yield encode(Message(CALL, number, head=head, body=body))


def _references() -> Frames:
    """Calls that create values at the callee whose references are never released."""
    me = current.agent()
    key = f"{me.name}#{me.incarnation}"
    body = pickle.dumps(((), {}), 5)
    for number in itertools.count(FIRST, 2):
        creation = pickle.dumps(((), (0, (key, number), (key, number + 1))), 5)
        yield encode(Message(CALL, number, HAS_REFERENCES, b"os:getpid", body=append(body, creation)))


def _streams() -> Frames:
    """Streams that are not read. Each is opened as by `rpc_stream`: the function, and two pulls."""
    for number in itertools.count(FIRST, 3):
        function = Producer(iter, number, 256, same_program=False)
        yield encode(Message(CALL, number, body=pickle.dumps((function, (partial(bytes, MB), None), {}), 5)))
        for index in range(2):
            body = pickle.dumps(((number, index, 0), {}), 5)
            yield encode(Message(CALL, number + 1 + index, head=b"telegrad._core.streams.producer:pull", body=body))


WAYS = {
    "quick": Way("calls that return at once", partial(_calls, "os:getpid"), 64),
    "sleeping": Way("calls that sleep", partial(_calls, "time:sleep", 60), 128),
    "unread": Way(
        "results of 10 MB that are not read", partial(_calls, "builtins:bytes", RESULT), 640, 128, 32, reads=False
    ),
    "descriptors": Way("results that are not given back", partial(_calls, "torch:zeros", KEPT), 640, LENT + 64, LENT),
    "references": Way("references that are not let go", _references, 192),
    "streams": Way("streams of 1 MB items that are not read", _streams, 2560, LENT + 64),
}

# Functions of the workers


def gained(rpc: Any) -> tuple[float, int]:
    """Return the memory in MB, and the number of open descriptors."""
    with open("/proc/self/statm") as file:
        memory = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / MB
    return memory, len(os.listdir("/proc/self/fd"))


def probe(rpc: Any, seconds: float) -> list[float]:
    """Make calls one after the other. Return the seconds of each call."""
    took = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        rpc.rpc_sync(f"worker{CALLEE}", operator.add, (1, 2))
        took.append(time.perf_counter() - start)
        time.sleep(1e-3)
    return took


def burn(seconds: float) -> int:
    """Use a processor without sending."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return 0


class Flood:
    """The flooder's connection to the callee, taken from the agent so that only this object reads and writes it."""

    def __init__(self, rpc: Any, way: str) -> None:
        rpc.rpc_sync(f"worker{CALLEE}", os.getpid)
        link = current.agent()._connections.peer(f"worker{CALLEE}").link
        assert isinstance(link, Link)
        while not link.reading.take():
            pass
        self._sock, self._way = link._sock, WAYS[way]
        self._frames = self._way.frames()
        self._left = b""
        self.sent = 0

    def run(self, seconds: float) -> int:
        """Send for some seconds. Return the number of frames sent. Lent memory is never returned."""
        end, before = time.perf_counter() + seconds, self.sent
        while (left := end - time.perf_counter()) > 0:
            readable, writable, _ = select.select([self._sock] if self._way.reads else [], [self._sock], [], left)
            try:
                if readable:
                    self._sock.recv(1 << 18)
                if writable:
                    if not self._left:
                        self._left = b"".join(itertools.islice(self._frames, BATCH))
                        self.sent += BATCH
                    self._left = self._left[self._sock.send(self._left) :]
            except NOT_NOW:
                pass
        return self.sent - before


def work(pipe: Connection, rank: int, port: int) -> None:
    """Run a worker that executes the commands of the pipe."""
    try:
        rpc = join(TELEGRAD, rank, CALLERS[-1] + 1, "host", port)
    except Exception:
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, None))
    floods: list[Flood] = []

    def do(told: tuple[str, Any]) -> Any:
        what, given = told
        if what == "prepare":
            return floods.append(Flood(rpc, given))
        if what == "flood":
            return floods[0].run(given)
        if what == "burn":
            return burn(given)
        return probe(rpc, given) if what == "probe" else gained(rpc)

    answer_all(pipe, do)


# Measurement


class Found(NamedTuple):
    """The results of one kind of flood."""

    idle: float  # p99 in ms
    busy: float
    flooded: float
    memory: float  # maximum growth of the callee in MB
    descriptors: int
    rate: float  # frames per second that the flooder sent

    @property
    def ratio(self) -> float:
        return self.flooded / self.idle

    def faults(self, way: Way, ratio: float = RATIO) -> list[str]:
        """Return descriptions of the figures that exceed the documented limits."""
        above = {
            "times the p99 beside an idle caller": (self.ratio, ratio),
            "MB of memory": (self.memory, way.memory),
            "descriptors": (self.descriptors, way.descriptors),
        }
        faults = [f"{found:.4g} {what}, at most {most:g}" for what, (found, most) in above.items() if found > most]
        if self.descriptors < way.least:
            faults.append(f"{self.descriptors} descriptors, at least {way.least}: this was no such flood")
        return faults


def p99(took: list[float]) -> float:
    return sorted(took)[int(0.99 * (len(took) - 1))] * 1e3


def measure(name: str, seconds: float, rounds: int) -> Found:
    took: dict[str, list[float]] = {"idle": [], "burn": [], "flood": []}
    sent = 0
    with children_killed() as children:
        port = free_port()
        children.extend(Child(work, rank, port) for rank in range(CALLERS[-1] + 1))
        for child in children:
            child.wait_answer(PATIENCE, children)

        def ask(rank: int, *told: Any) -> Any:
            children[rank].tell(told)
            return children[rank].wait_answer(PATIENCE, children)

        for caller in CALLERS:
            ask(caller, "probe", WARM)
        before = most = ask(CALLEE, "gained", None)
        for _ in range(rounds):
            for state in ("idle", "burn"):
                _probe(children, took[state], seconds, state)
        # Last, because the effects of the flood would remain while its caller is idle.
        ask(FLOODER, "prepare", name)
        for _ in range(rounds):
            sent += _probe(children, took["flood"], seconds, "flood")
            most = tuple(map(max, most, ask(CALLEE, "gained", None)))
    memory, files = (now - then for now, then in zip(most, before, strict=True))
    rate = sent / (rounds * (seconds + 2 * WARM))
    idle, busy, flooded = (p99(each) for each in took.values())
    return Found(idle, busy, flooded, memory, int(files), rate)


def _probe(children: list[Child], took: list[float], seconds: float, state: str) -> int:
    """Time the callers while the flooder is in a state. Return the number of frames that it sent."""
    flooder = children[FLOODER]
    if state != "idle":
        flooder.tell((state, seconds + 2 * WARM))
        time.sleep(WARM)
    for caller in CALLERS:
        children[caller].tell(("probe", seconds))
    for caller in CALLERS:
        took += children[caller].wait_answer(PATIENCE, children)
    return int(flooder.wait_answer(PATIENCE, children)) if state != "idle" else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.floods", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="*", help=f"of {', '.join(WAYS)}; all if none is given")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round; 3 if not given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ratio", type=float, default=RATIO, help=f"of the p99, at most; {RATIO:g} if not given")
    parser.add_argument("--check", action="store_true", help="fail where a figure is not as documented")
    given = parser.parse_args()
    if unknown := set(given.ways) - set(WAYS):
        parser.error(f"there is no way {min(unknown)!r}")
    titles = ["idle", "busy", "flooded", "to idle", "to busy"]
    titles += ["memory", "(at most)", "descriptors", "(at most)", "frames/s"]
    print(f"{'p99 in ms, MB':<14}", *(f"{title:>11}" for title in titles), flush=True)
    failed = False
    for name in given.ways or WAYS:
        way, found = WAYS[name], measure(name, given.seconds, given.rounds)
        ratios = found.ratio, found.flooded / found.busy
        figures = found.idle, found.busy, found.flooded, *ratios, found.memory, way.memory
        counts = found.descriptors, way.descriptors, found.rate
        print(f"{name:<14}", *(f"{each:11.2f}" for each in figures), *(f"{each:11.0f}" for each in counts), flush=True)
        for fault in found.faults(way, given.ratio):
            print(f"{name}: {fault}", flush=True)
            failed = True
    return int(failed and given.check)


if __name__ == "__main__":
    run(main)
