"""Tests of workers with which an elastic group cannot connect: other TLS files, TLS on one side only, another key."""

import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.membership.generations import COME, Arrival
from telegrad._core.worker import current
from tests.cluster import free_port, processes, run_all, wait_until
from tests.directory import etcd_servers, redis_server
from tests.rpc.members import error_of
from tests.rpc.test_elastic import join
from tests.transport.test_tls import Authority

CASES = [
    *(("tcp", wrong) for wrong in ("files", "certificate", "none", "only", "key")),
    pytest.param("file", "files", marks=pytest.mark.nightly),
    pytest.param("etcd", "files", marks=etcd_servers.needs_etcd),
    pytest.param("redis", "none", marks=redis_server.NEEDED),
]


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[str]:
    if request.param in ("tcp", "file"):
        yield f"tcp://127.0.0.1:{free_port()}" if request.param == "tcp" else f"file://{tmp_path}/store"
        return
    server = etcd_servers.Node("n", tmp_path) if request.param == "etcd" else redis_server.Server(tmp_path)
    server.start()
    yield server.where
    server.kill()


lines: list[str] = []


def begin(place: str, name: str, least: int, own: dict[str, Any]) -> tuple[str, str, int]:
    """Join; return the name and the text of the error, if any, and the number of the generation."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("telegrad").addHandler(handler)
    kind, said = error_of(join, place, name, least, 4, **{"transport": "tcp", "key": "the key of the group", **own})
    return (kind.__name__, said, 0) if kind is not None else ("", "", rpc.generation().number)


def step(_: int) -> int:
    return rpc.rendezvous_again().number


@pytest.mark.parametrize(("place", "wrong"), CASES, indirect=["place"])
def test_a_worker_that_the_others_cannot_connect_to_is_refused(place: str, wrong: str, tmp_path: pathlib.Path) -> None:
    """The generation of the others continues, and later workers join it."""
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    right: list[dict[str, Any]] = [{} if wrong == "only" else {"tls": ours.files(name)} for name in "abe"]
    stranger, said = {
        "files": ({"tls": theirs.files("c")}, "refuses the certificate of worker"),
        "certificate": ({"tls": theirs.files("c")._replace(authority=ours.path)}, "unknown ca. Give all workers"),
        "none": ({}, "one of the two workers uses TLS and the other does not: give tls=... to all workers"),
        "only": ({"tls": ours.files("c")}, "one of the two workers uses TLS and the other does not: give tls=..."),
        "key": ({"tls": ours.files("c"), "key": "the key of another group"}, "Give all workers the same key"),
    }[wrong]
    with processes(4) as made:
        first = run_all(made[:2], lambda rank: begin(place, "ab"[rank], 2, right[rank]))
        run_all(made[:2], step)  # the first one returns at once
        kind, text, _ = made[2].run(begin, place, "c", 2, stranger)
        assert issubclass(getattr(errors, kind), errors.AuthenticationFailed)
        assert said in text
        assert run_all(made[:2], step) == [number for *_, number in first]
        made[3].begin(begin, place, "e", 2, right[2])
        wait_until(lambda: run_all(made[:2], step) != [number for *_, number in first])
        assert made[3].end() == ("", "", first[0][2] + 1)


def told_of_stranger(_: int) -> int:
    return sum("'stranger'" in line and "give tls=" in line for line in lines)


def come_as_stranger(_: int) -> int:
    """Write the arrival of a worker with TLS, unless this worker does not lead; return the number of the generation."""
    here = current.here()
    if here.turning.leads:
        stranger = here.me._replace(name="stranger", incarnation="another life", uses_tls=True)
        arrival = Arrival(stranger, limits=here.turning.generation.limits).to_json().encode()
        here.elastic._held.directory.swap(f"{COME}another life", arrival)
        wait_until(lambda: told_of_stranger(0))
    return step(0)


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_a_generation_does_not_end_for_a_worker_that_its_leader_refuses(place: str) -> None:
    with processes(2) as made:
        first = run_all(made, lambda rank: begin(place, "ab"[rank], 2, {}))
        run_all(made, step)
        assert run_all(made, come_as_stranger) == run_all(made, step) == [number for *_, number in first]
        assert sum(run_all(made, told_of_stranger)) == 1
