"""Tests of opening the store where workers meet: URLs, environment variables, and what can be wrong at its address."""

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from telegrad import errors
from telegrad._core.security.keyring import Keyring, new_key
from telegrad._core.stores import raw_stores, sealed_store, stores
from telegrad._core.stores.raw_stores import reach_tcp
from telegrad._core.stores.sealed_store import OPEN, OVER, SERVED, KeyValueStore, read_server_mark
from telegrad._core.stores.stores import RendezvousStore
from tests.cluster import free_port, in_background, in_threads, opened, processes, sealed, takes_less_than, wait_until

VARIABLES = ["MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@contextlib.contextmanager
def stranger(answer: bytes | None, greets: bool = False) -> Iterator[int]:
    """Serve a port that is no store: answer the first bytes with `answer`, or stay silent, or speak first."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as held:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = held.enter_context(listener.accept()[0])
                    if answer is not None:
                        if not greets:
                            connection.recv(1)
                        connection.sendall(answer)
                        connection.close()

        with in_background(serve):
            try:
                yield listener.getsockname()[1]
            finally:
                listener.shutdown(socket.SHUT_RDWR)


def meets(one: RendezvousStore, other: RendezvousStore) -> bool:
    KeyValueStore(one.store).swap("word", "", "heard")
    return KeyValueStore(other.store).read("word") == "heard"


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:{}", "tcp://[::1]:{}", "tcp://localhost:{}"])
def test_rank_0_serves_and_others_may_come_earlier(url: str) -> None:
    url = url.format(free_port())
    late = threading.Event()

    def serve() -> RendezvousStore:
        assert late.wait(30)
        return opened(url, 0, 2, 30)

    def join() -> RendezvousStore:
        late.set()
        return opened(url, 1, 2, 30)

    served, joined = in_threads(serve, join)
    assert meets(served, joined)
    assert (joined.rank, joined.world_size) == (1, 2)
    assert joined.host in url


def test_rank_and_size_are_read_from_the_url() -> None:
    meeting = opened(f"tcp://127.0.0.1:{free_port()}?rank=0&world_size=3", -1, None, 30)
    assert (meeting.rank, meeting.world_size) == (0, 3)


def test_rank_and_size_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    served = opened("env://", -1, 2, 30)
    assert served.rank == 0
    assert meets(served, opened("env://", 1, 2, 30))
    assert opened("env://", 1, None, 30).world_size is None  # a dynamic group, as no size is given


def test_under_torchrun_the_store_of_the_agent_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first, second = opened("env://", 0, 2, 30), opened("env://", 1, 2, 30)
    assert meets(first, second)
    assert first.where == f"127.0.0.1:{agent.port}"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # each agent counts this for itself
    assert KeyValueStore(opened("env://", 0, 2, 30).store).read("word") == "heard"


def test_workers_meet_in_a_file(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    assert meets(opened(url, 0, 2, 30), opened(url, 1, 2, 5))
    assert opened(url, 1, 2, 30).host is None


def test_a_file_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(errors.StoreUnreachable, match="/absent/store"):
        opened(f"file://{tmp_path}/absent/store", 0, 2, 30)


def test_a_scheme_that_the_program_registered_is_used() -> None:
    store = dist.HashStore()

    def handler(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
        yield store, 1, 2

    with contextlib.suppress(RuntimeError):  # registered by an earlier run of this test in this process
        dist.register_rendezvous_handler("ours", handler)
    meeting = opened("ours://", 1, 2, 30)
    assert (meeting.rank, meeting.world_size, meeting.host) == (1, 2, None)


@pytest.mark.parametrize(
    "url",
    [
        *("tcp://host", "tcp://:80", "tcp://host:0", "tcp://h:99999", "tcp://h:x", "tcp://h:1?rank=a", "tcp://[::1"),
        *("file://", "no://a", ""),
        pytest.param(
            "file://store", marks=pytest.mark.skipif(sys.platform == "win32", reason="C:/store is a path there")
        ),
    ],
)
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(errors.UsageError):
        opened(url, 0, 2, 30)


@pytest.mark.parametrize(
    ("name", "value"), [(n, None) for n in VARIABLES[:3]] + [("MASTER_PORT", "x"), ("MASTER_PORT", "0"), ("RANK", "-1")]
)
def test_a_variable_that_is_missing_or_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None
) -> None:
    for each, good in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(free_port())), ("RANK", "0")):
        monkeypatch.setenv(each, good)
    monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(errors.UsageError, match=name):
        opened("env://", -1, 2, 30)


@pytest.mark.parametrize(
    ("rank", "size", "words"),
    [
        (2, 2, "rank 2 is not within a group of 2: ranks go from 0 to 1"),
        (-2, 2, "rank -2 is not within a group of 2"),
        (0, 0, "world_size must be the number of the group's workers"),
        (0, 10**9, "world_size must be the number of the group's workers, 1 to 65536"),
        (0, -1, "world_size must be"),
    ],
)
@pytest.mark.parametrize("url", ["tcp://127.0.0.1:1", "file:///nonexistent/store", "env://"])
def test_an_invalid_rank_or_size_is_refused_before_the_store_is_opened(
    url: str, rank: int, size: int, words: str
) -> None:
    with pytest.raises(errors.UsageError, match=words):
        opened(url, rank, size, 30)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_does_not_resolve_is_reported_at_once(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=unknown))
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    monkeypatch.setenv("MASTER_PORT", "29500")
    told = r"'nowhere.invalid' cannot be resolved.*MASTER_ADDR"
    with takes_less_than(1), pytest.raises(errors.UsageError, match=told):
        opened("env://", rank, 2, 30)


def test_the_next_server_waits_until_the_last_groups_store_has_gone(tcp: str) -> None:
    with processes(1) as (other,):
        other.run(serve_a_store_that_is_over, tcp)
        found: list[RendezvousStore] = []
        thread = threading.Thread(target=lambda: found.append(opened(tcp, 0, 2, 30)))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()  # no error yet, since that server is about to go
        other.kill()
        thread.join(30)
        assert found[0].serves


_held: list[RendezvousStore] = []


def serve_a_store_that_is_over(url: str) -> None:
    _held.append(opened(url, 0, 2, 30))
    KeyValueStore(_held[0].store).swap(SERVED, OPEN, OVER)


def test_a_port_of_another_program_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "GOING", 0.2)
    with stranger(b"HTTP/1.0 400 Bad Request\r\n\r\n") as port:
        with pytest.raises(errors.StorePortTaken, match=f"port {port}.*MASTER_PORT") as caught:
            opened(f"tcp://127.0.0.1:{port}", 0, 2, 30)
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is not None


def test_a_store_that_is_marked_a_moment_after_it_answers_is_shared() -> None:
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with in_background(KeyValueStore(sealed(other)).write, SERVED, OPEN, after=0.1):
        assert not opened(f"tcp://127.0.0.1:{other.port}", 0, 2, 30).serves


def test_the_store_of_telegrad_run_is_not_used_before_it_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a worker with another key that comes at that moment would be the first of another group."""
    raw = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(raw.port), "TELEGRAD_STORE": f"127.0.0.1:{raw.port}"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    other = Keyring([new_key()])
    with pytest.raises(errors.StoreUnreachable, match="not open yet"):
        opened("env://", -1, None, 0.2)
    with ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(opened, "env://", -1, None, 10, other)
        KeyValueStore(sealed(raw)).write(SERVED, OPEN)
        with pytest.raises(errors.StoreUntrusted):
            stranger.result()
    assert read_server_mark(opened("env://", -1, None, 10).store) == OPEN


def test_the_port_of_another_programs_store_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MARKED", 0.1)
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(errors.StorePortTaken):
        opened(f"tcp://127.0.0.1:{other.port}", 0, 2, 30)


def test_a_process_shares_its_own_store() -> None:
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    for_torch = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
    assert meets(opened(url, 0, 2, 30), opened(url, 1, 2, 5))
    assert KeyValueStore(sealed(for_torch)).read("word") == "heard"


def test_a_store_that_no_worker_serves_is_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "meet_tcp", None)  # torch would sleep for half a second between its attempts
    port = free_port()
    with takes_less_than(1), pytest.raises(errors.StoreUnreachable, match=f"127.0.0.1:{port}.*rank 0"):
        opened(f"tcp://127.0.0.1:{port}", 1, 2, 0.05)


@pytest.mark.parametrize("greets", [False, True], ids=["answers", "speaks first"])
@pytest.mark.parametrize(
    "answer", [None, b"", b"220", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.0 400 Bad Request\r\n\r\n", 8 * b"\xff"]
)
def test_torchs_client_is_not_connected_to_another_program(
    answer: bytes | None, greets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That client can wait there without end, and a process that ends meanwhile is aborted."""
    met = Mock(wraps=reach_tcp)
    monkeypatch.setattr(raw_stores, "reach_tcp", met)
    with stranger(answer, greets) as port:
        told = f"127.0.0.1:{port} is not the group's store"
        with takes_less_than(2), pytest.raises(errors.StoreUnreachable, match=told):
            opened(f"tcp://127.0.0.1:{port}", 1, 2, 0.1)
    assert not met.called


def test_a_store_that_is_not_open_yet_is_connected_to_once(tcp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    met, looked = Mock(wraps=raw_stores.meet_tcp), Mock(wraps=read_server_mark)
    monkeypatch.setattr(stores, "meet_tcp", met)
    monkeypatch.setattr(stores, "read_server_mark", looked)
    served = opened(tcp, 0, 2, 30)
    KeyValueStore(served.store).write(SERVED, OVER)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(opened, tcp, 1, 2, 30)
        wait_until(lambda: looked.call_count > 3)
        KeyValueStore(served.store).write(SERVED, OPEN)
        assert meets(served, joining.result(30))
    assert met.call_count == 1


def test_a_store_that_is_slow_to_connect_to_is_tried_again(tcp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks up the name of the peer, for which a name server may take seconds."""
    tries = []

    def connect(*given: Any) -> object:
        tries.append(given)
        if len(tries) == 1:
            stuck.wait(30)
        return reach_tcp(*given)

    stuck = threading.Event()
    served = opened(tcp, 0, 2, 30)
    monkeypatch.setattr(stores, "TAKEN", 0.05)
    monkeypatch.setattr(stores, "PROBE", 0.05)
    monkeypatch.setattr(raw_stores, "reach_tcp", connect)
    assert meets(served, opened(tcp, 1, 2, 30))
    stuck.set()
    assert len(tries) == 2


def test_a_store_of_an_ended_group_is_not_joined(tcp: str) -> None:
    old = opened(tcp, 0, 2, 30)
    assert KeyValueStore(old.store).read(SERVED) == OPEN
    assert KeyValueStore(old.store).swap(SERVED, OPEN, OVER) == OVER
    with pytest.raises(errors.StoreUnreachable, match="earlier group"):
        opened(tcp, 1, 2, 0.02)
    assert meets(opened(tcp, 0, 2, 30), opened(tcp, 1, 2, 30))


def test_a_worker_without_a_rank_serves_if_no_other_does(tcp: str) -> None:
    meetings = in_threads(*[lambda: opened(tcp, -1, None, 30)] * 4)
    assert all(meets(meetings[0], other) for other in meetings)
    assert {(meeting.rank, meeting.world_size) for meeting in meetings} == {(-1, None)}


def test_the_error_of_a_lost_store_has_one_line(tcp: str) -> None:
    served, joined = opened(tcp, 0, 2, 30), opened(tcp, 1, 2, 30)
    del served
    with pytest.raises(errors.RendezvousError, match="the store was lost") as caught:
        KeyValueStore(joined.store).read("a")
    assert "\n" not in str(caught.value)


def test_a_store_that_does_not_answer_is_lost_and_is_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, over = [], threading.Event()

    class Stopped:
        def compare_set(self, *args: str) -> NoReturn:
            calls.append(args)
            over.wait()
            raise RuntimeError

    monkeypatch.setattr(sealed_store, "ANSWER", 0.05)
    board = KeyValueStore(sealed(Stopped()))
    for _ in range(2):
        with pytest.raises(errors.StoreLost, match="it does not answer"):
            board.read("a")
    over.set()
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_reads_swaps_and_hints_work_with_each_kind_of_store(kind: str, tmp_path: Path) -> None:
    raw = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(f"{tmp_path}/store", -1),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }[kind]()
    store = sealed(raw)
    board = KeyValueStore(store, "prefix")
    assert board.read("a") == "" == board.wait("a", 0)
    assert board.swap("a", "", "1") == "1"
    assert board.swap("a", "", "2") == "1" == board.read("a") == board.wait("a", 0)
    assert board.swap("a", "1", "") == "" == board.read("a")
    assert board.swap("a", "", "3") == "3"
    board.write("b", "4")
    assert board.read_all(["a", "b"]) == ["3", "4"]
    board.add_hint("n")
    board.add_hint("n")
    assert board.hint("n") == 2
    assert KeyValueStore(store).read("a") == ""


def test_a_wrong_key_in_a_dynamic_group_is_reported(tcp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STRANGE", 0.2)
    served = opened(tcp, 0, None, 30)
    assert served.serves
    with takes_less_than(30):
        for rank in (-1, 0, 1):
            with pytest.raises(errors.StoreUntrusted, match="TELEGRAD_KEY"):
                opened(tcp, rank, None, 40, Keyring([new_key()]))


def test_a_url_without_a_scheme_is_refused_with_those_that_can_be_used() -> None:
    with pytest.raises(
        errors.UsageError, match=r"'localhost:29500' cannot be used: .*etcd://HOST:PORT/PREFIX or redis://"
    ):
        stores.open_store("localhost:29500", 0, None, Keyring([b"a key"]), 1.0)
