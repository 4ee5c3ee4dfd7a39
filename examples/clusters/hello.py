"""Each worker calls the next: start it by whatever launcher there is, which tells each of them where it is.

torchrun --nproc-per-node 4 hello.py
mpirun -n 4 python hello.py
srun --ntasks 4 python hello.py
"""

from __future__ import annotations

import socket

import telegrad.rpc as rpc


def where() -> str:
    return f"{rpc.get_worker_info().name} is on {socket.gethostname()}"


def main() -> None:
    rpc.init_rpc(role="worker")
    me, workers = rpc.get_worker_info(), rpc.workers()
    following = workers[(me.id + 1) % len(workers)]
    said = rpc.rpc_sync(following, where)
    print(f"{me.name} of {len(workers)}: {said}\n", end="", flush=True)  # in one piece, beside those of others
    rpc.shutdown()


if __name__ == "__main__":
    main()
