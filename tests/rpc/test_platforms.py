"""What other platforms lack is taken away here: two workers get along without."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from tests.cluster import PATIENCE, free_port

PROGRAM = """
import os, select, socket, sys, time


class Lacking:
    def __get__(self, instance, owner):
        raise AttributeError


for module, names in (
    (os, ("memfd_create", "eventfd", "sched_yield")),
    (select, ("poll", "epoll")),
    (time, ("pthread_getcpuclockid",)),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in ("sendmsg", "recvmsg", "recvmsg_into"):
    setattr(socket.socket, name, Lacking())

import telegrad.transport.sockets as sockets

sockets.HAS_UNIX = False

import torch
import telegrad.rpc as rpc
from telegrad.transport import memory, writer
from telegrad.rpc import current

assert not writer.GATHERS and not memory.SHARING

def double(x):
    return 2 * x

def main(rank, port):
    rpc.init_rpc(
        f"w{rank}", rank=rank, world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=60),
    )
    if rank == 0:
        assert not current.agent().describe(0, "").unix
        for size in (1, 1000, 1 << 22):
            tensors = [torch.arange(size, dtype=torch.float32) + n for n in range(3)]
            for tensor, back in zip(tensors, rpc.rpc_sync("w1", list, (tensors,))):
                assert torch.equal(tensor, back)
        futures = [rpc.rpc_async("w1", double, (n,)) for n in range(2000)]
        assert [future.wait() for future in futures] == [2 * n for n in range(2000)]
        ref = rpc.remote("w1", double, (torch.ones(1 << 20),))
        assert (ref + 1).sum().to_here().item() == 3 << 20
        del ref
    rpc.shutdown()
    print("done")

if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
"""


def test_without_what_only_linux_has(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    port = str(free_port())
    workers = [
        subprocess.Popen(
            [sys.executable, program, str(rank), port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for worker in workers:
        out, err = worker.communicate(timeout=PATIENCE)
        assert (worker.returncode, out) == (0, "done\n"), err
