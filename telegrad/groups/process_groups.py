"""Process groups of `torch.distributed` for the workers of a group, whose collectives are fast and synchronous."""

from __future__ import annotations

import contextlib
import datetime
import secrets
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from telegrad.errors import InvalidArgument, UsageError
from telegrad.ext.arguments import checks
from telegrad.ext.calls import DEFAULT, limit_of
from telegrad.ext.starting import reach_tcp, serve_tcp
from telegrad.ext.workers import current
from telegrad.groups import collectives
from telegrad.groups.group import Group

LONGEST = 1800.0  # seconds, if the caller sets no limit: torch requires one


def process_group(group: Group, backend: str = "gloo", timeout: float = DEFAULT) -> dist.ProcessGroup:
    """As `telegrad.process_group`."""
    if not isinstance(group, Group):
        raise InvalidArgument(
            f"process_group takes a group of workers, such as rpc.group('actor'), not {checks.short_repr(group)}"
        )
    checks.text("backend", backend, "the name of a backend of torch.distributed")
    if ":" not in backend and backend.lower() not in dist.Backend.backend_list:
        known = ", ".join(each for each in dist.Backend.backend_list if each != dist.Backend.UNDEFINED)
        raise InvalidArgument(f"torch.distributed has no backend {checks.short_repr(backend)}; it has {known}")
    worker = current.here()
    seconds = limit_of(timeout, worker.agent.timeout) or LONGEST
    brings = None
    if group[0].name == worker.me.name:
        address = worker.me.tcp[0]
        store, port = serve_tcp(address, 0)
        brings = address, port, secrets.token_hex(8)
    met = collectives.meet("process_group", group, backend, brings, timeout)
    names = [name for name, _ in met]
    place = met[0][1]
    if place is None:
        raise UsageError(
            f"the workers disagree about the group: {names[0]!r} is not the first member of {group!r} in its own view"
        )
    address, port, key = place
    limit = datetime.timedelta(seconds=seconds)
    if brings is None:
        store = reach_tcp(address, port, limit)
    made = _make(store, names.index(worker.me.name), names, backend, f"telegrad-{key}", limit)
    worker.at_end.append(lambda: _destroy(made))
    return made


def _make(
    store: Any, rank: int, names: list[str], backend: str, name: str, limit: datetime.timedelta
) -> dist.ProcessGroup:
    """Make a process group as torch makes its default group, but without registering it as the default.

    Torch has no public API for this.
    """
    made: dist.ProcessGroup
    made, _ = c10d._new_process_group_helper(
        len(names),
        rank,
        [],
        dist.Backend(backend),
        store,
        c10d.GroupName(name),
        timeout=limit,
        group_desc=", ".join(names),
    )
    c10d._world.pg_group_ranks[made] = {place: place for place in range(len(names))}
    return made


def _destroy(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(ValueError, AssertionError):  # the program has destroyed it already
        dist.destroy_process_group(group)
