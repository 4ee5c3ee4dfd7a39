"""Errors of device maps, and the routes that they define."""

import tempfile
from functools import partial
from typing import Any

import pytest
import torch

from telegrad import errors, rpc
from telegrad._core.calls.settings import TelegradOptions, TensorPipeRpcBackendOptions
from telegrad._core.membership.members import Devices, map_errors
from telegrad._core.rpc.cluster import start
from telegrad._core.wire.tensors import HOST, for_answers, for_calls, for_gradients
from telegrad._core.worker import current
from tests.accelerator.apart import apart
from tests.cluster import agents, in_threads, opened
from tests.devices.kinds import SIM, group, places

TWO = Devices(2)


def with_map(
    map_: dict[str, str], to: str = "b", count: int = 2, allowed: tuple[Any, ...] | tuple[str] = ()
) -> Devices:
    return Devices(count, {to: map_}, allowed)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (TWO, TWO, None),
        (with_map({"cuda:0": "cuda:1", "cuda:1": "cuda:0", "cpu": "cpu"}), TWO, None),
        (with_map({"cpu": "cuda:1", "cuda:0": "cpu"}), TWO, None),
        (with_map({"cuda:0": "cuda:0"}, to="a"), TWO, None),
        (with_map({"cpu": "cpu"}, count=0), Devices(0), None),
        (with_map({"cuda": "cuda:1"}, count=1), TWO, None),
        (with_map({"cuda:0": "cuda:1", "cpu": "cpu"}, allowed=("cuda:0",)), Devices(2, {}, ("cuda:1",)), None),
        (Devices(2, {}, ("cuda:2",)), TWO, "devices with invalid indices in its option devices: cuda:2"),
        (with_map({"cuda:0": "cuda:0"}, to="z"), TWO, "invalid target node names in its device maps: z. .* a, b"),
        (with_map({"cuda:2": "cuda:0"}), TWO, "source devices with invalid indices in its device map for b: cuda:2"),
        (with_map({"cuda:0": "cuda:2"}), TWO, "target devices with invalid indices in its device map for b: cuda:2"),
        (with_map({"cuda:0": "cuda:0"}), Devices(0), "target devices with invalid indices.*Worker b has 0"),
        (with_map({"cuda:0": "cuda:1", "cuda:1": "cuda:1"}), TWO, "duplicated target devices in its device map for b"),
        (with_map({"cuda:0": "cuda:0"}, allowed=("cuda:1",)), TWO, "unexpected source devices in its device map for b"),
        (
            with_map({"cuda:0": "cuda:1"}),
            Devices(2, {}, ("cuda:0",)),
            "unexpected target devices.*worker b allows cuda:0",
        ),
    ],
)
def test_errors_of_maps(a: Devices, b: Devices, expected: str | None) -> None:
    found = list(map_errors({"a": a, "b": b}))
    if expected is None:
        assert found == []
    else:
        assert len(found) == 1
        assert pytest.raises(AssertionError, match=f"^Node a has {expected}").matches(AssertionError(found[0]))


def test_unknown_names_in_a_map_are_no_error_for_a_part_of_a_group() -> None:
    assert list(map_errors({"a": with_map({"cuda:0": "cuda:0"}, to="z")}, whole=False)) == []


def test_devices_that_calls_can_use() -> None:
    mine = Devices(4, {"b": {"cuda:0": "cuda:1", "cpu": "cuda:2"}}, ("cuda:3",))
    others = [Devices(4, {"a": {"cuda:1": "cuda:2", "cuda:0": "cpu"}, "c": {"cuda:0": "cuda:1"}}), TWO]
    assert mine.uses_of("a", others) == {"cuda:0", "cuda:2", "cuda:3"}


CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def test_routes_of_calls_and_answers() -> None:
    calls = for_calls("b", {"cuda:0": "cuda:1"})
    assert (calls(FIRST), calls(CPU), calls.keeps_host) == (1, HOST, True)
    with pytest.raises(errors.DeviceError, match=r"set_device_map\('b', {'cuda:1': 'cuda:1'}\)"):
        calls(SECOND)
    answers = for_answers("a", {"cuda:0": "cuda:1", "cuda:1": "cpu"})
    assert (answers(SECOND), answers(CPU), answers.keeps_host) == (0, 1, False)
    with pytest.raises(errors.DeviceError, match=r"Response device mapping is not available for cuda:0.*'a'"):
        answers(FIRST)


def test_routes_of_gradients_lead_back_to_the_source() -> None:
    back = for_gradients({"cuda:0": "cuda:0"}, {"cuda:1": "cuda:0"})
    assert (back(FIRST), back(SECOND), back(CPU)) == (1, HOST, HOST)
    assert for_gradients({"cuda:0": "cuda:1"}, {})(FIRST) == 1


def test_options_take_devices_in_any_spelling() -> None:
    options = TensorPipeRpcBackendOptions(device_maps={"b": {"cuda:0": torch.device("cuda:1")}}, devices=["cuda"])
    options.set_device_map("b", {"cuda:1": "cuda:0"})
    assert options.device_maps == {"b": {FIRST: SECOND, SECOND: FIRST}}
    assert options.devices == [FIRST]
    assert TelegradOptions(device_maps={"b": {0: 1}}).device_maps["b"] == {FIRST: SECOND}
    assert options.published().maps == {"b": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}}


def test_maps_are_one_to_one() -> None:
    options = TelegradOptions()
    options.set_device_map("b", {0: 1})
    options.set_device_map("b", {0: 1})
    with pytest.raises(ValueError, match=r"only supports 1-to-1 mapping: cuda:0 goes to cuda:1 of worker 'b'"):
        options.set_device_map("b", {0: 0})
    with pytest.raises(RuntimeError, match=r"must be the index of an accelerator.*not -1"):
        options.set_device_map("b", {-1: 0})


@pytest.mark.parametrize("devices", [["cuda:77"], [77], [torch.device("cuda", 77)], ["cpu", "meta"]], ids=str)
def test_a_missing_device_is_an_error_on_all_workers(devices: list[Any]) -> None:
    name = str(TelegradOptions(devices=devices).devices[-1])
    errors_of: list[BaseException] = []
    told = rf"Node w1 has devices with invalid indices in its option devices: {name}\. Worker w1 has 0 acc"
    with tempfile.TemporaryDirectory() as folder:

        def join(rank: int) -> None:
            options = TelegradOptions(devices=devices if rank else None)
            meet = partial(opened, f"file://{folder}/store", rank, 2)
            with pytest.raises(errors.DeviceError, match=told) as caught:
                start(f"w{rank}", meet, options, current.enter)
            errors_of.append(caught.value)

        in_threads(partial(join, 0), partial(join, 1))
    assert len(errors_of) == 2


@pytest.mark.parametrize("kind", [SIM])
@apart
def test_devices_of_another_type_are_refused(kind: str) -> None:
    for options in (TelegradOptions(devices=["meta"]), TelegradOptions(device_maps={"b": {"meta": 0}})):
        with pytest.raises(errors.DeviceError, match=f"no device meta:0, its accelerators are of the type {kind}"):
            options.published()


def test_a_map_without_devices_is_refused_when_workers_join() -> None:
    maps = {"w1": {"cuda:0": "cuda:0"}}
    with pytest.raises(errors.DeviceError, match=r"source devices.*has 0 acc"), agents(2, device_maps=maps):
        pass


@pytest.mark.parametrize("kind", [SIM])
@apart
def test_a_wrong_map_is_an_error_on_all_workers(kind: str) -> None:
    here, there = places(kind)
    wrong = [({"w1": {here: there, there: there}}, "duplicated"), ({"none": {here: there}}, "invalid target")]
    for maps, fault in wrong:
        with pytest.raises(ValueError, match=f"Node w0 has {fault}"), agents(2, device_maps=maps):
            pass


@pytest.mark.parametrize("kind", [SIM])
@apart
def test_in_a_dynamic_group_a_map_is_checked_at_the_first_call(kind: str) -> None:
    here, _ = places(kind)
    with group(kind, dynamic=True) as (first, _):
        connections = first.agent._connections
        me = connections.joined.me._replace(devices=with_map({str(here): f"{kind}:7"}, to="w1"))
        connections._joined = connections.joined._replace(me=me)
        connections._peers.clear()  # each worker is connected to the next member
        connections.forget_names([])
        with pytest.raises(errors.DeviceError, match="target devices with invalid indices"):
            rpc.rpc_sync("w1", torch.add, (1, 1))
    with group(kind, dynamic=True, device_maps={"w1": {here: here}}):
        assert rpc.rpc_sync("w1", torch.add, (torch.ones(1, device=here), 1)).tolist() == [2.0]
