"""For torchrun's elastic agents: notes each group that forms, and waits for the next one while it is alone."""

from __future__ import annotations

import os
import pathlib
import sys
import time

import telegrad.rpc as rpc

rpc.init_rpc(role="worker")
me, size = rpc.get_worker_info(), len(rpc.workers())
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
others = [rpc.rpc_sync(rank, rpc.get_worker_info).name for rank in range(size) if rank != me.id]
with pathlib.Path(sys.argv[1]).open("a") as notes:
    notes.write(f"{attempt} {me.id} {size} {' '.join(others)}".rstrip() + "\n")
if size == 1:
    time.sleep(600)  # until its agent ends it, since another agent has come
if attempt == 0 and me.id == 1:
    os._exit(1)
rpc.shutdown()
