"""The minimum cost of encryption, without Telegrad: `python -m benchmarks.encryption_floor [--quick]`.

Two processes echo bytes over loopback with blocking sockets and one thread each, alternately plain and with AES-GCM.
The sender encrypts each record into a buffer and sends that. The receiver decrypts it into its final memory. This is
the lower bound for the results of `python -m benchmarks.encryption`.

Processor time is the sum of both processes. Other programs affect it less.
"""

from __future__ import annotations

import argparse
import socket
import statistics
from collections.abc import Sequence
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from typing import NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.command import run
from benchmarks.measuring import MB
from benchmarks.processes import Child, answer_all

ROUNDS, QUICK_ROUNDS = 15, 5
PATIENCE = 120.0
RECORD, TAG = 1 << 19, 16  # bytes; RECORD as in telegrad._core.security.noise
ECHOES = {60: 2000, 1 << 10: 1000, 64 << 10: 200, MB: 40, 16 * MB: 4, 64 * MB: 2}  # per turn, by size


class Plain:
    """One end of a plain connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: memoryview) -> None:
        self._sock.sendall(data)

    def receive(self, place: memoryview) -> None:
        while place:
            count = self._sock.recv_into(place)
            if not count:
                raise ConnectionError("the other process ended")
            place = place[count:]


class Encrypted(Plain):
    """One end of a connection with encrypted records."""

    def __init__(self, sock: socket.socket, is_parent: bool) -> None:
        super().__init__(sock)
        keys = [bytes(32), bytes([1]) * 32]  # one per direction, so that a key never uses a nonce twice
        self._sending, self._receiving = map(AESGCM, keys if is_parent else reversed(keys))
        self._sent = self._received = 0  # records, which number the nonces
        self._leaves, self._arrives = (memoryview(bytearray(RECORD + TAG)) for _ in range(2))

    def send(self, data: memoryview) -> None:
        for at in range(0, len(data), RECORD):
            part = data[at : at + RECORD]
            record = self._leaves[: len(part) + TAG]
            self._sending.encrypt_into(self._sent.to_bytes(12, "big"), part, None, record)
            self._sent += 1
            super().send(record)

    def receive(self, place: memoryview) -> None:
        for at in range(0, len(place), RECORD):
            part = place[at : at + RECORD]
            record = self._arrives[: len(part) + TAG]
            super().receive(record)
            self._receiving.decrypt_into(self._received.to_bytes(12, "big"), record, None, part)
            self._received += 1


class Turn(NamedTuple):
    """The times of one echo, in seconds."""

    median: float
    best: float
    processors: float  # processor time of both processes, mean


def answer(pipe: Connection, port: int) -> None:
    """Run the process that sends received bytes back, as many times as requested."""
    ends = (
        Plain(socket.create_connection(("127.0.0.1", port))),
        Encrypted(socket.create_connection(("127.0.0.1", port)), is_parent=False),
    )
    memory = memoryview(bytearray(max(ECHOES)))

    def echo(told: tuple[int, int, int]) -> float:
        kind, size, count = told
        begun = process_time()
        for _ in range(count):
            ends[kind].receive(memory[:size])
            ends[kind].send(memory[:size])
        return process_time() - begun

    answer_all(pipe, echo)


def measure(child: Child, end: Plain, kind: int, source: memoryview, place: memoryview) -> Turn:
    """Measure echoes of `source`, which are received into `place`."""
    count = ECHOES[len(source)]
    child.tell((kind, len(source), count))
    taken, begun = [], process_time()
    for _ in range(count):
        start = perf_counter()
        end.send(source)
        end.receive(place)
        taken.append(perf_counter() - start)
    here = process_time() - begun
    return Turn(statistics.median(taken), min(taken), (here + child.wait_answer(PATIENCE)) / count)


def print_row(child: Child, ends: Sequence[Plain], source: memoryview, place: memoryview, rounds: int) -> None:
    plain, encrypted = (
        list(turns)
        for turns in zip(
            *([measure(child, end, kind, source, place) for kind, end in enumerate(ends)] for _ in range(rounds)),
            strict=True,
        )
    )
    pairs = list(zip(encrypted, plain, strict=True))
    longer = statistics.median(more.median / less.median for more, less in pairs)
    best = min(turn.best for turn in encrypted) / min(turn.best for turn in plain)
    work = statistics.median(more.processors / less.processors for more, less in pairs)
    columns = [statistics.median(turn.median for turn in side) * 1e6 for side in (plain, encrypted)]
    columns += [statistics.median(turn.processors for turn in side) * 1e6 for side in (plain, encrypted)]
    figures = "".join(f"{each:12,.1f}" for each in columns)
    print(f"{len(source):10,}{figures}   {longer:.2f} {best:.2f} {work:.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encryption_floor", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    rounds = QUICK_ROUNDS if parser.parse_args().quick else ROUNDS
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = Child(answer, server.getsockname()[1])
        try:
            ends = Plain(server.accept()[0]), Encrypted(server.accept()[0], is_parent=True)
            # Write to the memory, because untouched pages all map to the same zero page.
            source, place = (memoryview(bytearray(b"1") * max(ECHOES)) for _ in range(2))
            print("              µs of one echo     µs of processor time   times as long:")
            print("     bytes       plain   encrypted       plain   encrypted   median, best, processor time")
            for size in ECHOES:
                print_row(child, ends, source[:size], place[:size], rounds)
        finally:
            child.kill()
    return 0


if __name__ == "__main__":
    run(main)
