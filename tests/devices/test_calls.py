"""Calls whose arguments and results are on accelerators."""

import contextlib
import threading
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from telegrad import errors, rpc
from telegrad._core.memory.device_streams import on
from telegrad.rpc.functions import async_execution
from tests import accelerator
from tests.devices.kinds import group, on_devices, places

WAYS = [
    pytest.param({"transport": "unix"}, id="unix"),
    pytest.param({"transport": "unix", "share": True}, id="shared"),
    pytest.param({"transport": "tcp"}, id="tcp"),
]
FEW_WAYS = [pytest.param(*WAYS[0].values, id="unix", marks=pytest.mark.nightly), *WAYS[1:]]
LARGE = 9_500_001  # bytes, sent in three pieces


def add(x: torch.Tensor, y: torch.Tensor | float) -> torch.Tensor:
    return x + y


def where(x: torch.Tensor) -> torch.device:
    return x.device


def slow_add(x: torch.Tensor, y: torch.Tensor | int = 1) -> torch.Tensor:
    """Add on a stream of its own, as user code may do."""
    outer, own = torch.accelerator.current_stream(x.device), torch.Stream(x.device)
    own.wait_stream(outer)
    with own:
        z = x + y
        for each in (x, y):
            if isinstance(each, torch.Tensor):
                each.record_stream(own)
    outer.wait_stream(own)
    z.record_stream(outer)
    return z


def relayed(to: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return slow_add(rpc.rpc_sync(to, slow_add, (x, y)), y)


@pytest.mark.parametrize(
    ("to", "way"),
    [*(pytest.param("w1", *each.values, id=each.id) for each in WAYS), pytest.param("w0", {}, id="itself")],
)
@on_devices
def test_tensors_are_sent_there_and_back(kind: str, to: str, way: dict[str, Any]) -> None:
    here, there = places(kind)
    with group(kind, **way):
        for round_ in range(3):  # from the second round on, devices share memory if they can
            x, y = torch.full((4,), 1.0 + round_, device=here), torch.arange(4.0, device=here)
            assert rpc.rpc_sync(to, where, (x,)) == there
            result = rpc.rpc_sync(to, add, (x, y))
            assert result.device == here
            assert result.tolist() == [1.0 + round_, 2.0 + round_, 3.0 + round_, 4.0 + round_]
            large = torch.arange(LARGE, device=here).to(torch.uint8)
            assert torch.equal(rpc.rpc_sync(to, add, (large, 1)).cpu(), (large + 1).cpu())


@pytest.mark.parametrize("way", FEW_WAYS)
@on_devices
def test_concurrent_calls_from_other_streams(kind: str, way: dict[str, Any]) -> None:
    here, _ = places(kind)
    with group(kind, 3, **way):
        before, after = torch.Stream(here), torch.Stream(here)
        for _ in range(3):
            with on(before):
                numbers = [torch.full((50,), float(number), device=here) for number in range(20)]
                futures = [rpc.rpc_async(f"w{1 + i % 2}", slow_add, (x, x)) for i, x in enumerate(numbers)]
            with on(after):
                sums = [future.wait() for future in futures]
                assert [each[0].item() for each in sums] == [2.0 * number for number in range(20)]
            x = torch.ones(5, device=here)
            assert rpc.rpc_sync("w1", relayed, ("w2", x, x)).tolist() == [3.0] * 5


@pytest.mark.parametrize("way", FEW_WAYS)
@on_devices
def test_calls_do_not_wait_for_the_device(kind: str, way: dict[str, Any]) -> None:
    here, _ = places(kind)
    with group(kind, **way):
        x = torch.ones(100, device=here)
        rpc.rpc_sync("w1", add, (x, x))
        if kind == "sim":
            accelerator.forget()
        results = [rpc.rpc_sync("w1", add, (x, x)) for _ in range(5)]
        results += [future.wait() for future in [rpc.rpc_async("w1", add, (x, x)) for _ in range(5)]]
        if kind == "sim":
            assert accelerator.synchronizations() == (0, 0)
        assert all(each.tolist() == [2.0] * 100 for each in results)


@pytest.mark.parametrize("way", FEW_WAYS)
@on_devices
def test_arguments_may_be_overwritten_after_the_answer(kind: str, way: dict[str, Any]) -> None:
    here, _ = places(kind)
    with group(kind, **way):
        for _ in range(4):
            x = torch.ones(70_000, device=here)
            kept = rpc.remote("w1", add, (x, 0))
            kept.to_here()
            x.fill_(5)
            assert kept.to_here().sum().item() == 70_000


def kinds_of_tensors(device: str | torch.device) -> dict[str, torch.Tensor]:
    base = torch.arange(24.0, device=device).reshape(4, 6)
    return {
        "strided": base[:, ::2],
        "transposed": base.t(),
        "far apart": torch.zeros(5000, device=device)[::1000],
        "expanded": torch.ones(1, device=device).expand(1000),
        "number": torch.tensor(3.5, device=device),
        "empty": torch.empty(0, 3, device=device),
        "half": base.to(torch.bfloat16),
        "bool": base > 3,
        "complex": torch.view_as_complex(torch.ones(3, 2, device=device)).conj(),
        "gradient": base.clone().requires_grad_(),
    }


@pytest.mark.parametrize("way", FEW_WAYS)
@on_devices
def test_kinds_of_tensors(kind: str, way: dict[str, Any]) -> None:
    here, _ = places(kind)
    with group(kind, **way):
        for name, tensor in kinds_of_tensors(here).items():
            back = rpc.rpc_sync("w1", torch.Tensor.detach, (tensor,))
            assert back.device == here, name
            assert torch.equal(back.cpu(), tensor.detach().cpu()), name
        base = torch.zeros(6, device=here)
        x, y = rpc.rpc_sync("w1", fill_the_first, (base[:4], base[2:]))
        assert (x.tolist(), y.tolist()) == ([1.0] * 4, [1.0, 1.0, 0.0, 0.0])
        assert base.tolist() == [0.0] * 6
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (3,)).to(here)
        assert rpc.rpc_sync("w1", torch.Tensor.coalesce, (sparse,)).cpu().to_dense().tolist() == [1.0, 0.0, 1.0]
        module = rpc.rpc_sync("w1", nn.Module.double, (nn.Linear(2, 1).to(here),))
        assert {parameter.device for parameter in module.parameters()} == {here}
        mixed = rpc.rpc_sync("w1", lambda pair: pair, ([torch.ones(2), torch.ones(2, device=here)],))
        assert [each.device.type for each in mixed] == ["cpu", kind]


def fill_the_first(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.fill_(1)
    return x, y


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@on_devices
def test_between_the_host_and_a_device(kind: str, transport: str) -> None:
    here, there = places(kind)
    host = torch.device("cpu")
    for map_, start in (({host: there}, host), ({here: host}, here)):
        with group(kind, transport=transport, device_maps=dict.fromkeys(("w0", "w1"), map_)):
            for size in (3, 2_000_000):
                x = torch.ones(size, device=start)
                assert rpc.rpc_sync("w1", where, (x,)) == map_[start]
                for to in ("w1", "w0"):
                    back = rpc.rpc_sync(to, add, (x, x))
                    assert back.device == torch.device(start)
                    assert back.sum().item() == 2 * size


@on_devices
def test_arrays_stay_on_the_host(kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    _, there = places(kind)
    with group(kind, device_maps={name: {"cpu": there} for name in ("w0", "w1")}):
        array, tensor = rpc.rpc_sync("w1", lambda *both: both, (numpy.ones(100_000), torch.ones(2)))
        assert array.sum() == 100_000
        assert tensor.tolist() == [1.0, 1.0]


@on_devices
def test_a_device_without_a_map(kind: str) -> None:
    here, there = places(kind)
    with group(kind, device_maps={}):
        for to in ("w1", "w0"):
            with pytest.raises(errors.DeviceError, match=rf"{here}.*only supports CPU.*set_device_map\('{to}'"):
                rpc.rpc_sync(to, add, (torch.ones(2, device=here), 1))
            with pytest.raises(errors.DeviceError, match=r"Response device mapping is not available.*caller, 'w0'"):
                rpc.rpc_sync(to, torch.ones, (2,), {"device": str(there)})
            made = rpc.remote(to, torch.ones, (2,), {"device": str(there)})
            with pytest.raises(errors.DeviceError, match="Response device mapping is not available"):
                rpc.rpc_sync("w0", rpc.RRef.to_here, (made,)) if to == "w0" else made.to_here()
            assert rpc.rpc_sync(to, add, (torch.ones(2), 1)).tolist() == [2.0, 2.0]


board: dict[int, torch.Tensor] = {}


def write_down(x: torch.Tensor, fails: bool) -> None:
    board[0] = x * 2
    if fails:
        raise KeyError("written all the same")


@on_devices
def test_side_effects_of_a_function_are_complete_after_its_answer(kind: str) -> None:
    here, _ = places(kind)
    with group(kind, crossed=False):
        for number in range(60):
            x = torch.full((3,), float(number), device=here)
            with contextlib.suppress(KeyError):
                rpc.rpc_sync("w1", write_down, (x, bool(number % 2)))
            assert torch.equal((board[0] + x).cpu(), torch.full((3,), 3.0 * number))


def fail(x: torch.Tensor) -> NoReturn:
    raise ValueError(x.sum().item(), x)


@on_devices
def test_an_exception_with_a_tensor_inside(kind: str) -> None:
    here, _ = places(kind)
    with group(kind), pytest.raises(Exception, match=r"3\.0"):
        rpc.rpc_sync("w1", fail, (torch.ones(3, device=here),))


@async_execution
def later(x: torch.Tensor) -> rpc.Future[torch.Tensor]:
    return rpc.rpc_async("w2", slow_add, (x, x)).then(lambda done: done.wait() + 1)


async def awaited(x: torch.Tensor) -> torch.Tensor:
    return await rpc.rpc_async("w2", slow_add, (x, x)) + 1


async def parted(x: torch.Tensor) -> torch.Tensor:
    """Return elements that are far apart, which are made contiguous to be sent."""
    return (x * 2)[::1000]


@pytest.mark.parametrize("way", FEW_WAYS)
@on_devices
def test_functions_that_return_futures_and_coroutines(kind: str, way: dict[str, Any]) -> None:
    here, _ = places(kind)
    with group(kind, 3, **way):
        for function in (later, awaited):
            for _ in range(3):
                x = torch.full((3,), 2.0, device=here)
                assert rpc.rpc_sync("w1", function, (x,)).tolist() == [5.0] * 3
                assert rpc.rpc_async("w1", function, (x,)).wait().tolist() == [5.0] * 3
        assert rpc.rpc_sync("w1", parted, (torch.ones(5000, device=here),)).tolist() == [2.0] * 5


@on_devices
def test_values_that_torch_cannot_inspect(kind: str) -> None:
    here, _ = places(kind)
    with group(kind):
        function, lock = rpc.rpc_async("w1", lambda x: (lambda: 7, x), (torch.ones(1, device=here),)).wait()
        assert (function(), lock.item()) == (7, 1.0)


class Locked:
    """An object that cannot be pickled."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.lock = threading.Lock()

    def increase(self, by: float) -> None:
        with self.lock:
            self.tensor += by

    def total(self) -> torch.Tensor:
        return self.tensor.sum()


@pytest.mark.parametrize("way", FEW_WAYS)
@on_devices
def test_references(kind: str, way: dict[str, Any]) -> None:
    here, _ = places(kind)
    with group(kind, 3, **way):
        locked = rpc.remote("w1", Locked, (torch.zeros(42, device=here),))
        for _ in range(3):
            locked.rpc_sync().increase(1)
        assert locked.rpc_sync().total().item() == 3 * 42
        chain: Any = rpc.remote("w1", slow_add, (torch.ones(3, device=here), 1))
        for _ in range(4):
            chain = chain + 1
        relay = rpc.remote("w2", rpc.RRef.to_here, (chain,))
        assert relay.to_here().tolist() == [6.0] * 3
        assert chain.to_here().device == here


@on_devices
def test_a_value_of_this_worker(kind: str) -> None:
    here, there = places(kind)
    with group(kind):
        with on(torch.Stream(here)):
            own = rpc.RRef(torch.ones(3, device=here))
        assert rpc.rpc_sync("w1", rpc.RRef.to_here, (own,)).tolist() == [1.0] * 3
        made = rpc.remote("w0", slow_add, (torch.ones(3, device=here), 1))
        for _ in range(3):
            made.rpc_sync().add_(1)
        with on(torch.Stream(there)):
            assert made.local_value().tolist() == [5.0] * 3


@on_devices
def test_a_first_call_that_waits_for_its_connection(kind: str) -> None:
    """Arguments have their values of the time of the call, although they are sent later."""
    here, _ = places(kind)
    for transport, to in (("unix", "w1"), ("tcp", "w1"), ("unix", "w0")):
        with group(kind, transport=transport):
            with on(torch.Stream(here)):
                first = rpc.rpc_async(to, add, (torch.ones(3, device=here), 1))
            assert first.wait().tolist() == [2.0] * 3
