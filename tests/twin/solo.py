"""The single process: names of Telegrad for programs, with a namespace in the place of each worker.

A namespace is a module in which the text of the program was run. A call on worker k runs the function of namespace k on
copies of its arguments, which keep their history if a context is open and gradients are enabled. Functions and classes
of the program are replaced by those of the namespace to which they are sent. Each worker has its own random state.

Everything runs on one thread: a call by `rpc_async` or `remote` has ended when its future or reference is returned.
"""

import types
from typing import Any

import torch
from torch import nn

from tests.twin.calls import RRef, async_execution, remote_in, rpc_async_in, rpc_sync_in, stream_in
from tests.twin.kept import Checkpoint, Publisher, Subscriber
from tests.twin.piping import Pipeline
from tests.twin.training import RemoteModule, backward_in, clip_in, context_in, gradients_in, optimizer_in
from tests.twin.world import World, random_state, restore_random_state


def _names_of(world: World) -> dict[str, Any]:
    def get_worker_info(name: str | None = None) -> Any:
        return types.SimpleNamespace(name=name or world.names[world.here], id=world.here)

    rpc = types.SimpleNamespace(
        rpc_sync=rpc_sync_in(world),
        rpc_async=rpc_async_in(world),
        remote=remote_in(world),
        rpc_stream=stream_in(world),
        RRef=world.kind(RRef),
        actor=lambda cls: cls,
        get_worker_info=get_worker_info,
        functions=types.SimpleNamespace(async_execution=async_execution),
    )
    autograd = types.SimpleNamespace(
        context=lambda: context_in(world),
        backward=backward_in(world),
        grad=lambda number, *args, **options: torch.autograd.grad(*args, **options),
        get_gradients=gradients_in(world),
    )
    return {
        "torch": torch,
        "nn": nn,
        "rpc": rpc,
        "autograd": autograd,
        "RemoteModule": world.kind(RemoteModule),
        "Pipeline": world.kind(Pipeline),
        "DistributedOptimizer": optimizer_in(world),
        "clip_grad_norm_": clip_in(world),
        "Publisher": world.kind(Publisher),
        "Subscriber": world.kind(Subscriber),
        "checkpoint": Checkpoint(world),
    }


def run(names: list[str], text: str, sends_modes: bool = True) -> dict[str, Any]:
    """Run a program; return what each worker has seen. `sends_modes`: the grad mode of a caller holds in its calls."""
    before = random_state()
    try:
        world = World(names, text, _names_of, sends_modes)
        world.spaces[0]["run"]()
        return {name: space["SEEN"] for name, space in zip(names, world.spaces, strict=True)}
    finally:
        restore_random_state(before)
