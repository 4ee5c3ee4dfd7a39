"""Every public name of a replaced module of the installed torch exists in the mode, too."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import types
from typing import Any

import pytest

from telegrad.compat.substitution import _family
from tests.cluster import processes

INNER = {  # internal names of torch, and names for its own agent only
    "torch.distributed.rpc": ["RemoteProfilerManager"],
    "torch.distributed.rpc.api": ["RemoteProfilerManager", "T", "TYPE_CHECKING", "docstring", "method", "method_name"],
    "torch.distributed.autograd": ["TYPE_CHECKING"],
    "torch.distributed.nn.api.remote_module": ["T"],
    "torch.distributed.optim.optimizer": ["functional_optim_map"],
    "torch._C._distributed_rpc": ["RemoteProfilerManager"],
    "torch._C._distributed_rpc_testing": ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions"],
}


def is_public(module: types.ModuleType, name: str, value: Any, families: list[list[str]]) -> bool:
    if name in getattr(module, "__all__", ()):
        return True
    if name.startswith("_") or isinstance(value, types.ModuleType):
        return False
    home = getattr(value, "__module__", None)
    return home is None or _family(home) in families


def missing() -> tuple[dict[str, set[str]], set[str], set[str]]:
    """Return the names, the modules, and the names in star imports that only torch has."""
    from telegrad.compat import places

    rpc, _ = importlib.import_module("torch.distributed.rpc"), importlib.import_module("torch.distributed.rpc._testing")
    ours = places.modules()
    families = list(map(_family, ours))
    names = {}
    for place, module in ours.items():
        theirs = importlib.import_module(place)
        public = {name for name, value in vars(theirs).items() if is_public(theirs, name, value, families)}
        names[place] = {name for name in public if not hasattr(module, name)}
    packages = [rpc, importlib.import_module("torch.distributed.autograd")]
    found = {f"{each.__name__}.{inner.name}" for each in packages for inner in pkgutil.iter_modules(each.__path__)}
    modules = {name for name in found if not name.rpartition(".")[2].startswith("_")}
    return names, modules - ours.keys(), set(rpc.__all__) - set(ours["torch.distributed.rpc"].__all__)


def test_no_public_name_is_missing() -> None:
    with processes(1) as (process,):
        names, modules, starred = process.run(missing)
    unknown = {place: found - set(INNER.get(place, ())) for place, found in names.items()}
    assert {place: found for place, found in unknown.items() if found} == {}
    assert (modules, starred) == (set(), set())


def refusals() -> list[tuple[bool, str]]:
    """Use names that the mode lacks; return the texts, and whether programs can find out without an error."""
    from telegrad import compat

    compat.install()
    found = []
    for place, name in (("internal", "_run_function"), ("api", "_no_name_of_torch")):
        module = importlib.import_module(f"torch.distributed.rpc.{place}")
        for use in (f"from {module.__name__} import {name}", f"module.{name}"):
            try:
                exec(use, {"module": module})
            except (ImportError, AttributeError) as error:
                found.append((hasattr(module, name), f"{type(error).__name__}: {error}"))
    for name in ("_x", "api._x"):
        there = importlib.util.find_spec("torch.distributed.rpc._x") is not None
        with pytest.raises(ModuleNotFoundError) as caught:
            importlib.import_module(f"torch.distributed.rpc.{name}")
        found.append((there, f"{caught.typename}: {caught.value}"))
    return found


def test_a_missing_name_is_refused_with_advice_however_it_is_used() -> None:
    with processes(1) as (process,):
        found = process.run(refusals)
    assert [(there, text.partition(":")[0]) for there, text in found] == [
        (False, "ImportError"),
        (False, "AttributeError"),
    ] * 2 + [(False, "ModuleNotFoundError")] * 2
    for _, text in found:
        assert "has no attribute '_" in text
        assert "without the inner workings of torch's own" in text
        assert "docs/migration.md" in text
