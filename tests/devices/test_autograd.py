"""Gradients over workers, of tensors on accelerators."""

from typing import Any

import pytest
import torch
from torch import nn

import telegrad.autograd as autograd
from telegrad import rpc
from telegrad._core.memory.device_streams import on
from telegrad._core.worker import current
from tests.autograd import programs
from tests.devices.kinds import group, on_devices, places

WAYS = [pytest.param({"transport": "unix", "share": True}, id="shared"), pytest.param({"transport": "tcp"}, id="tcp")]
EACH = 15  # programs in one test


@pytest.mark.parametrize("first", [0, EACH, *(pytest.param(each * EACH, marks=pytest.mark.nightly) for each in (2, 3))])
@on_devices
def test_random_programs(kind: str, first: int) -> None:
    with group(kind, 5, crossed=False, share=bool(first % 2)):
        programs.device = str(places(kind)[0])
        compared = 0
        for seed in range(first, first + EACH):
            try:
                compared += programs.check(seed)
            except Exception as error:
                raise AssertionError(f"SEED={seed} {error}") from error
        assert compared


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def scaled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return square(x) * rpc.rpc_sync("w2", torch.mul, (by, 3))


@pytest.mark.parametrize("way", WAYS)
@on_devices
def test_a_gradient_is_on_the_device_of_its_leaf(kind: str, way: dict[str, Any]) -> None:
    here, _ = places(kind)
    with group(kind, 3, **way):
        for stream in (torch.accelerator.current_stream(here), torch.Stream(here)):
            with on(stream):
                x = torch.arange(3.0, device=here, requires_grad=True)
                y = torch.full((3,), 2.0, device=here, requires_grad=True)
                for _ in range(3):
                    with autograd.context() as context:
                        loss = rpc.rpc_sync("w1", scaled, (x, y)).sum()
                        autograd.backward(context, [loss])
                        gradients = autograd.get_gradients(context)
                        assert gradients[x].device == here
                        assert gradients[x].tolist() == [0.0, 12.0, 24.0]
                        assert gradients[y].tolist() == [0.0, 3.0, 12.0]


@pytest.mark.parametrize("way", WAYS)
@on_devices
def test_gradients_for_a_thread_of_another_worker(kind: str, way: dict[str, Any]) -> None:
    """After the pass, its gradients are complete for threads that did not run it, too."""
    here, there = places(kind)
    with group(kind, **way) as workers:
        leaf = torch.ones(3, device=there, requires_grad=True)
        kept.clear()
        kept.append(leaf)
        for _ in range(20):
            with autograd.context() as context:
                autograd.backward(
                    context, [rpc.rpc_sync("w1", times_what_is_kept, (torch.ones(3, device=here),)).sum()]
                )
                current.enter(workers[1])
                assert (autograd.get_gradients(context)[leaf] * 2).tolist() == [2.0] * 3
                current.enter(workers[0])


kept: list[torch.Tensor] = []


def times_what_is_kept(x: torch.Tensor) -> torch.Tensor:
    return x * kept[0]


@on_devices
def test_a_gradient_of_a_mapped_tensor_returns_to_the_host(kind: str) -> None:
    _, there = places(kind)
    maps = {"w1": {"cpu": there}}
    with group(kind, device_maps=maps):
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("w1", square, (x,)).sum()])
            assert autograd.get_gradients(context)[x].tolist() == [2.0] * 3


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@on_devices
def test_maps_that_do_not_agree(kind: str, transport: str) -> None:
    """A gradient may arrive on another device than that of its tensor, or on the host; it is moved."""
    here, there = places(kind)
    of_rank = [{"w1": {here: there}}, {"w0": {here: here}}]
    with group(kind, transport=transport, of_rank=lambda rank: {"device_maps": of_rank[rank]}):
        x = torch.arange(3.0, device=here, requires_grad=True)
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("w1", square, (x,)).sum()])
            assert autograd.get_gradients(context)[x].tolist() == [0.0, 2.0, 4.0]


class Layer(nn.Module):
    def __init__(self, device: str | torch.device) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner = nn.Linear(4, 4).to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))

    def gradient(self, context: int) -> torch.Tensor:
        return autograd.get_gradients(context)[self.inner.weight].cpu()


def made(device: str | torch.device) -> rpc.RRef[Any]:
    return rpc.RRef(Layer(device))


@pytest.mark.parametrize("way", WAYS)
@on_devices
def test_several_passes_through_remote_layers(kind: str, way: dict[str, Any]) -> None:
    here, there = places(kind)
    with group(kind, 3, **way):
        layers = [rpc.rpc_sync(name, made, (there,)) for name in ("w1", "w2")]  # in order, as they draw numbers
        torch.manual_seed(6)
        batches = [torch.randn(5, 4) for _ in range(4)]
        own = [Layer("cpu"), Layer("cpu")]
        local = nn.Sequential(*own)
        for batch in batches:
            local(batch).sum().backward()
        with autograd.context() as context:
            losses = []
            for batch in batches:
                x = batch.to(here)
                for layer in layers:
                    x = layer.rpc_sync().forward(x)
                losses.append(x.sum())
            for future in [autograd.backward_async(context, [loss]) for loss in losses]:
                future.wait()
            for mine, layer in zip(own, layers, strict=True):
                assert mine.inner.weight.grad is not None
                assert torch.allclose(layer.rpc_sync().gradient(context), mine.inner.weight.grad, atol=1e-5)


def leaf(device: str | torch.device) -> torch.Tensor:
    return torch.ones(3, device=device, requires_grad=True)


@on_devices
def test_hooks_of_received_tensors_use_the_right_stream(kind: str) -> None:
    """They run on the stream on which the tensors arrived."""
    _, there = places(kind)
    with group(kind):
        for _ in range(3):
            seen = []
            with autograd.context() as context:
                received = rpc.rpc_async("w1", leaf, (there,)).wait()
                received.register_hook(lambda gradient: seen.append(gradient * 3))  # noqa: B023 - called at once
                received.grad_fn.register_hook(lambda _, given: seen.append(given[0] * 4))  # noqa: B023
                autograd.backward(context, [(received * 2).sum()])
                assert [each.tolist() for each in seen] == [[6.0] * 3, [8.0] * 3]
