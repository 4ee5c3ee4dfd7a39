"""Every public name of a replaced module of the installed torch exists in the mode, too."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

LOOK = """
import importlib, json, pkgutil, sys, types
import torch.distributed.rpc, torch.distributed.rpc._testing
from telegrad.compat.places import modules as make
from telegrad.compat.substitution import _family

OURS = make()
FAMILIES = [_family(place) for place in OURS]

def is_public(module, name, value):
    if name in getattr(module, "__all__", ()):
        return True
    if name.startswith("_") or isinstance(value, types.ModuleType):
        return False
    home = getattr(value, "__module__", None)
    return home is None or _family(home) in FAMILIES

def public(place):
    module = importlib.import_module(place)
    return {name for name, value in vars(module).items() if is_public(module, name, value)}

missing = {
    place: sorted(name for name in public(place) if not hasattr(ours, name))
    for place, ours in OURS.items()
}
modules = [
    f"{package.__name__}.{each.name}"
    for package in (torch.distributed.rpc, torch.distributed.autograd)
    for each in pkgutil.iter_modules(package.__path__)
    if not each.name.startswith("_")
]
ours = OURS["torch.distributed.rpc"]
starred = sorted(set(torch.distributed.rpc.__all__) - set(ours.__all__))
print(json.dumps({"missing": missing, "modules": sorted(set(modules) - OURS.keys()), "starred": starred}))
"""
INNER = {  # internal names of torch, and names for its own agent only
    "torch.distributed.rpc": ["RemoteProfilerManager"],
    "torch.distributed.rpc.api": ["RemoteProfilerManager", "T", "TYPE_CHECKING", "docstring", "method", "method_name"],
    "torch.distributed.autograd": ["TYPE_CHECKING"],
    "torch.distributed.nn.api.remote_module": ["T"],
    "torch.distributed.optim.optimizer": ["functional_optim_map"],
    "torch._C._distributed_rpc": ["RemoteProfilerManager"],
    "torch._C._distributed_rpc_testing": ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions"],
}


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_public_names(seen: dict[str, Any]) -> None:
    unknown = {place: set(names) - set(INNER.get(place, ())) for place, names in seen["missing"].items()}
    assert {place: names for place, names in unknown.items() if names} == {}


def test_modules(seen: dict[str, Any]) -> None:
    assert seen["modules"] == []


def test_star_imports_give_the_names_of_torch(seen: dict[str, Any]) -> None:
    assert seen["starred"] == []
