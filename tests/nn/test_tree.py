"""The modules that belong to a model that is spread over workers."""

from typing import Any

import pytest
import torch
from torch import nn

from telegrad._core.modules.module_tree import branches
from telegrad.errors import UsageError
from telegrad.nn import RemoteModule
from telegrad.rpc import RRef, remote, rpc_sync

pytestmark = pytest.mark.usefixtures("here")


def found(model: "Net | RRef[Any] | RemoteModule") -> dict[str, str]:
    return {branch.name: branch.root.owner_name() for branch in branches(model)}


class Net(nn.Module):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def make_net(**places: str) -> Net:
    return Net(**{name: remote(place, nn.Linear, (2, 2)) for name, place in places.items()})


def hold(module: RRef[nn.Module], name: str, other: RRef[Any]) -> None:
    setattr(module.local_value(), name, other)


def test_attributes_lists_and_dictionaries() -> None:
    model = Net(
        one=remote("w1", nn.Linear, (2, 2)),
        several=[remote("w1", nn.Linear, (2, 2)), RemoteModule("w2", nn.Identity)],
        named={"a": (remote("w2", nn.Linear, (2, 2)),)},
        inner=nn.ModuleList([RemoteModule("w2", nn.Linear, (2, 2)), nn.Linear(2, 2)]),
        bare=remote("w1", nn.Parameter, (torch.ones(2),)),
    )
    assert found(model) == {
        "": "w0",
        "one": "w1",
        "several.0": "w1",
        "several.1": "w2",
        "named.a.0": "w2",
        "inner.0": "w2",
        "bare": "w1",
    }


def test_modules_that_refer_from_worker_to_worker() -> None:
    model = Net(far=RemoteModule("w1", make_net, (), {"one": "w2", "other": "w0"}))
    assert found(model) == {"": "w0", "far": "w1", "far.one": "w2", "far.other": "w0"}
    assert found(remote("w1", make_net, (), {"one": "w2"})) == {"": "w1", "one": "w2"}
    assert found(RemoteModule("w2", make_net, (), {"one": "w0"})) == {"": "w2", "one": "w0"}


def test_references_in_a_circle() -> None:
    one, other = remote("w1", Net), remote("w2", Net)
    rpc_sync("w1", hold, (one, "other", other))
    rpc_sync("w2", hold, (other, "one", one))
    assert found(Net(start=one)) == {"": "w0", "start": "w1", "start.other": "w2"}


def test_references_to_other_values_are_ignored() -> None:
    model = Net(data=remote("w1", torch.ones, (2,)), text=remote("w2", str, ("x",)), part=nn.Linear(1, 1))
    assert found(model) == {"": "w0"}
    with pytest.raises(UsageError, match="is not a module and does not refer to one"):
        branches(remote("w1", str, ("x",)))
    with pytest.raises(UsageError, match="not int"):
        branches(5)  # type: ignore[arg-type]


def reference_to(module: RRef[Any]) -> RRef[Any]:
    return module


def test_a_reference_to_a_reference() -> None:
    assert found(remote("w1", reference_to, (remote("w2", nn.Linear, (2, 2)),))) == {"": "w2"}
