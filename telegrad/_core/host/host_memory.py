"""How much memory this process may use: that of the machine, or less where a container limits it.

The size of /dev/shm is no bound here: files of `memfd_create` do not lie in it, and count as memory of the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
UNKNOWN = 8 << 30  # bytes that are assumed where the system does not say


def usable() -> int:
    """Return the bytes of memory that this process may use at most."""
    return min([_of_machine(), *_limits()])


def _of_machine() -> int:
    with suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf, and not every system these names
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return UNKNOWN


def _limits() -> Iterator[int]:
    """The limits of the control groups of this process and of all above them."""
    with suppress(OSError, ValueError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory") and "memory" not in controllers.split(","):
                continue
            root, name = (GROUPS / "memory", "memory.limit_in_bytes") if controllers else (GROUPS, "memory.max")
            own = PurePosixPath(path.lstrip("/"))
            for group in (own, *own.parents):
                with suppress(OSError, ValueError):  # "max", or a file that the container does not show
                    yield int((root / group / name).read_text())
