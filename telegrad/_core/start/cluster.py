"""Assembles a worker from all parts. Read this file first: it is the only one that knows every part.

    options -> store -> worker listens -> rendezvous -> the group's directory and key -> worker joins -> leaves

The layers below get everything they need from here, and do not import this layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from telegrad._core.calls.settings import Settings
from telegrad._core.devices.device_maps import map_errors
from telegrad._core.host import open_files
from telegrad._core.joining.join import join
from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.members import Member, Members, check_name, check_role
from telegrad._core.rpc import joint_calls, retry
from telegrad._core.rpc.rref import RRef
from telegrad._core.stores.address import host_identity, own_address
from telegrad._core.stores.stores import RendezvousStore
from telegrad._core.streams import producer, streams
from telegrad._core.worker import actors
from telegrad._core.worker.options import TelegradOptions
from telegrad._core.worker.value_access import open_roots
from telegrad._core.worker.worker import Worker, WorkerExtensions
from telegrad.errors import DeviceError


def start(
    name: str | None,
    meet: Callable[[float], RendezvousStore],
    options: TelegradOptions,
    entered: Callable[[Worker], None],
    kind: type[RRef[Any]] = RRef,
    role: str = "",
) -> Worker:
    """Create a worker and let it join its group; without a name it is named after its role and a number.

    `meet` opens the store within a time. `entered` is called on each thread that will run user code. References have
    the class `kind`.
    """
    check_role(role)
    if name is not None:
        check_name(name)
    timeout = options.rpc_timeout or float("inf")
    with contextlib.ExitStack() as undo:  # on an error
        extensions = WorkerExtensions(name or role)
        undo.callback(extensions.each, lambda extension: extension.close())
        open_files.check()
        settings = _settings(options)
        meeting = meet(timeout)
        address = own_address(options.address, meeting.host)
        worker = Worker(name or role, settings, address, entered, kind._of_handle, open_roots, extensions)
        undo.callback(worker.agent.close)
        actors.serve(worker.agent, worker.references)
        producer.serve(worker)
        retry.serve(worker)
        streams.serve(worker)
        joint_calls.serve(worker)
        me = worker.agent.describe(meeting.rank, host_identity())._replace(name=name or "", role=role)
        extensions.each(lambda each: each.on_start(worker, meeting.rank, meeting.world_size, meeting.where))
        joined = join(meeting, me, options.silence, timeout)
        if isinstance(joined.directory, DynamicGroup):
            undo.callback(joined.directory.leave)
        _check(joined.me, joined.directory)
        worker.join(joined, _devices_of(joined.me, joined.directory))
        undo.pop_all()
    return worker


def _settings(options: TelegradOptions) -> Settings:
    own: dict[str, Any] = {name: getattr(options, name) for name in Settings._fields if hasattr(options, name)}
    own["devices"] = options.published()
    return Settings(threads=options.num_worker_threads, timeout=options.rpc_timeout, **own)


def _check(me: Member, directory: Members | DynamicGroup) -> None:
    """Raise DeviceError if a device map cannot work; in a dynamic group, maps to other workers are checked later."""
    members = directory if isinstance(directory, Members) else [me]
    group = {member.name: member.devices for member in members}
    fault = next(iter(map_errors(group, whole=isinstance(directory, Members))), None)
    if fault is not None:
        raise DeviceError(fault)


def _devices_of(me: Member, directory: Members | DynamicGroup) -> list[int]:
    """Return the accelerators that calls may use; in a dynamic group, later workers may use others."""
    others = [member.devices for member in directory] if isinstance(directory, Members) else []
    return sorted(torch.device(used).index for used in me.devices.uses_of(me.name, others))
