"""A worker of an elastic group that is stopped for longer than `silence`, and goes on."""

from __future__ import annotations

import pathlib
import signal
import sys

import pytest

import telegrad.rpc as rpc
from telegrad._core.joining import form_generations
from telegrad._core.worker.options import TelegradOptions
from tests.cluster import PATIENCE, free_port, processes, wait_until
from tests.rpc import test_elastic
from tests.rpc.test_elastic import end, is_right, train, wait_for_steps

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sees in /proc that a process is stopped")
SILENCE = 1.0


def train_with_silence(place: str, name: str, folder: str, least: int) -> object:
    """Make steps in a group that waits for other workers for far longer than this test does."""

    def join(place: str, name: str, least: int, most: int) -> None:
        form_generations.LAST_CALL = 0.3
        options = TelegradOptions(init_method=place, rpc_timeout=10 * PATIENCE, silence=SILENCE, heartbeat=SILENCE)
        rank = int(name.removeprefix("w"))
        rpc.init_rpc(name, rank=rank, min_workers=least, max_workers=most, rpc_backend_options=options)
        rpc.on_lost(lambda *_: pathlib.Path(folder, f"{name}.lost").touch())

    test_elastic.join = join  # type: ignore[assignment]
    return train(place, name, folder, least, 3)


@pytest.mark.parametrize(("least", "rank"), [(2, 2), (3, 0), (3, 2)])
def test_the_others_go_on_without_it_and_it_comes_back(tmp_path: pathlib.Path, rank: int, least: int) -> None:
    """Where they are too few without it they wait in the directory, and it must come there by itself."""
    place = f"tcp://127.0.0.1:{free_port()}"
    names = [f"w{number}" for number in range(3)]
    others = [name for name in names if name != names[rank]]
    with processes(3) as made:
        for name, process in zip(names, made, strict=True):
            process.begin(train_with_silence, place, name, str(tmp_path), least)
        for name in names:
            wait_for_steps(tmp_path, name, 3, 3)
        made[rank].kill(signal.SIGSTOP)
        wait_until(lambda: any((tmp_path / f"{name}.lost").exists() for name in others))
        for name in others if least == 2 else ():
            wait_for_steps(tmp_path, name, 3, 2)
        made[rank].kill(signal.SIGCONT)
        for name in names:
            wait_for_steps(tmp_path, name, 3, 3)
        found = end(tmp_path, made)
    assert all(state == found[0][0] and is_right(state) for state, _ in found)
