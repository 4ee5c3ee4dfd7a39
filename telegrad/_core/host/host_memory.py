"""The memory that this process may use: that of the machine, or less if a container limits it.

The size of /dev/shm does not count: `memfd_create` files are not in it, and count as memory of the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
UNKNOWN = 8 << 30  # bytes assumed if the system reports no size


def usable() -> int:
    return min([_of_machine(), *_limits()])


def _of_machine() -> int:
    # Windows has no sysconf, and other systems may lack these names
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return UNKNOWN


def _limits() -> Iterator[int]:
    """Yield the limits of the control groups of this process and of all their ancestors."""
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
