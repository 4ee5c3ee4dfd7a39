"""The orders of a schedule to a worker, sent over its pipe; each function gets the worker's number first."""

import gc

import torch

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.memory import extra_streams
from telegrad._core.rpc import cluster
from telegrad.weights import publisher
from tests.chaos import functions, leaks
from tests.chaos.board import Board
from tests.chaos.load import Load, Tally
from tests.chaos.operations import Wrong
from tests.chaos.proxy import Address, stand_behind_proxy
from tests.cluster import init

HOSTS = 3  # number of simulated hosts of workers that are reached over TCP
PIECE = 1 << 14  # bytes of a version of weights that travel at a time
STRIPE_FROM = 1 << 18  # bytes; the large tensors of the load are smaller than those of the world

_before: leaks.Holding  # when the worker joined
_meshed: leaks.Holding  # when all were connected with all
_board: Board
_load: Load


def join(rank: int, count: int, port: int, transport: str, timeout: float, proxy: Address | None, board: str) -> None:
    global _before, _board
    _board = Board(board, count)
    torch.set_num_threads(1)
    leaks.keep_briefly()
    extra_streams.STRIPE_FROM = STRIPE_FROM
    publisher.PIECE = PIECE
    if transport == "tcp":  # like workers of several hosts
        cluster.host_identity = lambda: f"host{rank % HOSTS}"  # type: ignore[attr-defined]
    gc.collect()
    _before = leaks.holding()
    if proxy is not None:
        stand_behind_proxy(proxy)
    init(rank, count, port, transport=transport, rpc_timeout=timeout)


def note_connected(_: int) -> None:
    global _meshed
    _meshed = leaks.holding()


def start_load(rank: int, seed: int, clients: int, timeout: float, squeezed: bool, record: str) -> None:
    global _load
    if squeezed:  # else the first optimizer imports it; a lack of memory then leaves half of it for good
        import torch._dynamo  # noqa: F401
    _load = Load(rank, _board, seed, clients, timeout, squeezed, record)


def stop_load(_: int) -> Tally:
    return _load.stop()


def let_go(_: int) -> None:
    """Forget the references and publishers that others left here."""
    functions.clear_shelf()
    gc.collect()


def call_all(rank: int, others: list[int], timeout: float) -> None:
    """Check that each connection and each event loop works."""
    for other in others:
        token = rank << 20 | other
        asked = f"worker{rank}", token, "", timeout
        back = rpc.rpc_sync(f"worker{other}", functions.relay_awaiting, asked, timeout=timeout)
        if back != (token, ""):
            raise Wrong(f"worker{other} answered {back}")


def reach_all(rank: int, others: list[int], timeout: float) -> None:
    """Do the same as `call_all`, with as many attempts as needed to replace broken connections."""

    def failure() -> errors.PeerError | None:
        try:
            call_all(rank, others, timeout)
        except errors.PeerError as error:
            return error
        return None

    if error := leaks.wait_for_nothing(failure):
        raise error


def left_over(_: int, dead: int) -> dict[str, int]:
    return leaks.wait_for_nothing(lambda: leaks.left(_meshed, dead))


def shut_down(_: int, timeout: float) -> None:
    rpc.shutdown(timeout=timeout)


def left_after_shutdown(_: int) -> dict[str, int]:
    return leaks.wait_until_closed(_before)
