"""A RemoteModule in TorchScript: a script module that calls back to Python, with the types of its interface."""

from __future__ import annotations

import inspect
import itertools
import linecache
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_SOURCE = """\
@torch.jit.ignore
def call(handle_number: int, {parameters}) -> returned:
    return handles[handle_number]({names})


class ScriptedRemoteModule(torch.nn.Module):
    def __init__(self, handle_number: int) -> None:
        super().__init__()
        self.handle_number = handle_number

    def forward(self, {parameters}) -> returned:
        return call(self.handle_number, {names})

    @torch.jit.export
    def forward_async(self, {parameters}) -> torch.jit.Future[returned]:
        return torch.jit.fork(self.forward, {names})

    @torch.jit.export
    def __getstate__(self) -> int:
        raise RuntimeError(
            "RemoteModule can only be pickled when using RPC. Passing a script RemoteModule over RPC is not supported."
        )
        return 0

    @torch.jit.export
    def __setstate__(self, state: int) -> None:
        pass
"""

handles: dict[int, Callable[..., Any]] = {}  # the callables of script modules, which cannot hold them
_numbers = itertools.count()


def make(forward: Callable[..., Any], interface: Any) -> nn.Module:
    """Return a module for `torch.jit.script`, whose `forward` has the signature of `interface`."""
    signature = inspect.signature(interface.forward, eval_str=True)
    parameters = list(signature.parameters.values())[1:]
    number = next(_numbers)
    handles[number] = forward
    scope: dict[str, Any] = {
        "__name__": __name__,
        "torch": torch,
        "handles": handles,
        "returned": signature.return_annotation,
    }
    texts = []
    for each in parameters:
        scope[f"type_{each.name}"] = each.annotation
        default = "" if each.default is each.empty else f" = {each.default!r}"
        texts.append(f"{each.name}: type_{each.name}{default}")
    source = _SOURCE.format(parameters=", ".join(texts), names=", ".join(each.name for each in parameters))
    name = f"<telegrad.compat.scripted {number}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # torch reads the source
    exec(compile(source, name, "exec", dont_inherit=True), scope)
    made: nn.Module = scope["ScriptedRemoteModule"](number)
    return made
