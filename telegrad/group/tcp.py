"""torch's store over TCP, in the form that torch has on this platform."""

from __future__ import annotations

import sys
from functools import partial

import torch.distributed as dist

tcp_store = partial(dist.TCPStore, use_libuv=sys.platform != "win32")  # torch is built without libuv there
