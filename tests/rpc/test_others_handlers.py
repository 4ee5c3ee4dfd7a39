"""Tests of signal handlers that raise within a call: for SIGTERM, and of torch's DataLoader."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.cluster import PATIENCE

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals"),
    pytest.mark.timeout(4 * PATIENCE),
]

PROGRAM = """
import faulthandler, multiprocessing, os, signal, sys, threading, time
import torch
from torch.utils.data import DataLoader, Dataset
import telegrad
import telegrad.rpc as rpc


class Killed(Dataset):
    def __init__(self, tells):
        self.tells = tells

    def __len__(self):
        return 1

    def __getitem__(self, at):
        # Before each item, the worker takes a lock that it shares with the program. A worker that is killed while it
        # holds the lock never releases it, and the DataLoader waits for it without a limit as it ends (torch 2.13:
        # 8 of 400). In here the worker holds no lock.
        self.tells.send(os.getpid())
        signal.pause()


def call_until(error, begin):
    calls = 0
    until = time.monotonic() + 20
    try:
        begin()  # the handler may run at once
        while time.monotonic() < until:
            assert rpc.rpc_sync("worker0", pow, (2, 3)) == 8
            calls += 1
    except error as raised:
        assert rpc.rpc_sync("worker0", pow, (2, 5)) == 32
        return f"{type(raised).__name__}: {raised}"
    return "nothing was raised"


if __name__ == "__main__":
    faulthandler.dump_traceback_later(70, exit=True)  # a hang says where
    with telegrad.local(1):
        told, tells = multiprocessing.Pipe(duplex=False)
        for _ in range(2):
            # Forked: SIGCHLD comes for children of this process only, not for those of a server that forks.
            batches = iter(DataLoader(Killed(tells), num_workers=1, multiprocessing_context="fork"))
            worker = told.recv()
            print(call_until(RuntimeError, lambda: os.kill(worker, signal.SIGKILL)).partition(" (")[0])
            del batches
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
        for _ in range(8):
            print(call_until(SystemExit, threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start))
"""


@pytest.mark.nightly
def test_a_dead_process_of_a_dataloader_and_sigterm_end_calls_by_their_errors(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # On a busy machine a wait may take longer than the 5 s after which it is logged to stderr.
    environment = {**os.environ, "TELEGRAD_PROGRESS": "0"}
    command = [sys.executable, str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE, env=environment)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == 2 * ["RuntimeError: DataLoader worker"] + 8 * ["SystemExit: asked to end"]
