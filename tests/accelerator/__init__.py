"""A simulated accelerator, `sim`, that finds missing waits between streams on machines without a GPU.

It takes PyTorch's PrivateUse1 slot for the whole process, and makes `torch.accelerator.is_available()` true there, so
load it only in processes of their own. Operations run at once on host memory, under the rules of a device: see
`device.cpp`, which is compiled at the first load and kept in the user's cache folder. `apart.apart` runs a test in a
process of its own that has it.

The rules are strict:

- Memory belongs to the stream that was current at its allocation. Another stream has to wait for that one even for the
  first use, and a use on another stream has to be known to that one, or recorded, when the memory is freed. It does not
  help that the streams meet later: if gradients are made on one stream, used by an optimizer on another and freed by
  `zero_grad`, this is found, although nothing goes wrong if the first stream waits before it allocates again.
- Work that the host has waited for, on any thread, comes before everything that is enqueued after that.
- There are 32 streams besides the default one for each device; the 33rd request returns the first one again.
- Autograd's threads do not survive a fork: a child can only run a backward pass if its parent never did.
"""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

DEVICES = 2  # the same as in device.cpp
_SOURCE = Path(__file__).with_name("device.cpp")


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def available() -> bool:
    """Return True if there is a compiler to build the accelerator with."""
    return sys.platform == "linux" and shutil.which(_compiler()) is not None


def _flags() -> list[str]:
    root = Path(torch.__file__).parent
    return [
        *("-O1", "-std=c++20", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *("-isystem", str(root / "include"), "-isystem", str(root / "include/torch/csrc/api/include")),
        *(f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"),
    ]


def build() -> Path:
    """Return the path of the library; compile it unless it is in the cache."""
    version = subprocess.run([_compiler(), "--version"], capture_output=True, check=True).stdout
    parts = [_SOURCE.read_bytes(), version, torch.__version__.encode(), " ".join(_flags()).encode()]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "telegrad-tests"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"sim-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:24]}.so"
    if library.exists():
        return library
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles for all others
        if not library.exists():
            unfinished = library.with_suffix(f".{os.getpid()}")
            made = subprocess.run(
                [_compiler(), str(_SOURCE), "-o", str(unfinished), *_flags()], capture_output=True, text=True
            )
            if made.returncode:
                raise RuntimeError(f"the simulated accelerator does not compile:\n{made.stderr[-4000:]}")
            unfinished.rename(library)
    return library


class _DeviceGuard(torch.accelerator.device_index):
    """Makes a device the current one for a while."""

    def __init__(self, device: Any) -> None:
        super().__init__(device if isinstance(device, int) else torch.device(device).index)


class _Module(types.ModuleType):
    """The module that PyTorch expects at `torch.sim`."""

    device = _DeviceGuard

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _lazy_init() -> None:
        pass

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return DEVICES

    @staticmethod
    def current_device() -> int:
        return torch.accelerator.current_device_index()

    @staticmethod
    def set_device(device: Any) -> None:
        torch.accelerator.set_device_index(device)

    @staticmethod
    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    @staticmethod
    def set_stream(stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Do nothing: operations use the host's generator, which `torch.manual_seed` seeds."""

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass

    @staticmethod
    def get_rng_state(device: Any = "sim") -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = "sim") -> None:
        torch.set_rng_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


@functools.cache
def load() -> None:
    """Register the accelerator in this process, for good."""
    torch.ops.load_library(str(build()))
    backend_registration.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _Module("torch.sim"))
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)


def violations() -> list[str]:
    """Return missing waits since the last `forget`, with one line for each kind."""
    return list(torch.ops.telegrad_sim.violations())


def forget() -> None:
    """Clear the violations and the counters."""
    torch.ops.telegrad_sim.forget()


def synchronizations() -> tuple[int, int]:
    """Return how often the host waited for whole devices, and for streams, events, blocking copies and values."""
    device_wide, others = torch.ops.telegrad_sim.synchronizations()
    return device_wide, others


def set_lateness(queries: int) -> None:
    """Set how many queries answer "not yet" after work was enqueued or an event recorded; the default is 2."""
    torch.ops.telegrad_sim.set_lateness(queries)
