"""Target devices of tensors sent to one worker: device maps as the `DeviceMapping` of `wire.packing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from telegrad._core.devices.device_maps import turned
from telegrad._core.wire.packing import DeviceMapping, DeviceRoute
from telegrad._core.wire.tensors import HOST


class DeviceRoutes(NamedTuple):
    """Target devices on the receiver, by the kind of message."""

    calls: DeviceMapping
    gradients: DeviceMapping


def for_calls(to: str, map_: Mapping[str, str]) -> DeviceMapping:
    return DeviceRoute(
        map_,
        "a tensor on {device} cannot be sent to worker "
        f"{to!r}: TensorPipe RPC backend only supports CPU tensors by default, and the device map to that worker has "
        "no entry for {device}. Add one with `set_device_map` on `TensorPipeRpcBackendOptions`, such as "
        f"options.set_device_map({to!r}, " + "{{'{device}': '{device}'}}), or send tensor.cpu()",
    )


def for_answers(to: str, map_: Mapping[str, str]) -> DeviceMapping:
    """Return the target devices of results: the inverse of the caller's map."""
    return DeviceRoute(
        turned(map_),
        "Response device mapping is not available for {device}: "
        f"the device map of the caller, {to!r}, to this worker has no such target. Add one on worker {to!r} with "
        "`set_device_map` on `TensorPipeRpcBackendOptions`, or return tensor.cpu()",
    )


def for_gradients(map_: Mapping[str, str], theirs: Mapping[str, str]) -> DeviceMapping:
    """Return the target devices of gradients, which go back along both maps; the receiver moves them further."""
    return DeviceRoute({**map_, **turned(theirs)}, "", otherwise=HOST)
