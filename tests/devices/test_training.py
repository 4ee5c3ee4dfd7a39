"""Training with parameters on accelerators gives the numbers of training on the host."""

import tempfile
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

import telegrad.autograd as autograd
import telegrad.checkpoint as checkpoint
from telegrad import rpc
from telegrad._core.memory.device_streams import on
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer, clip_grad_norm_
from tests.cluster import in_threads
from tests.devices.kinds import group, on_devices, on_host_and_devices, places
from tests.test_checkpoint import step

WIDTH = 4
MAPS = [pytest.param(True, id="map"), pytest.param(False, id="no map")]


def options(mapped: bool) -> dict[str, Any]:
    """Return options of a group with or without maps between its devices."""
    return {} if mapped else {"device_maps": {}}


def layer(seed: int) -> nn.Sequential:
    """Return a layer with fixed parameters; several agents of one process share torch's own generator."""
    made = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.uniform_(-0.8, 0.8, generator=chance)
    return nn.Sequential(made, nn.Tanh())


def data(seed: int, device: str | torch.device = "cpu") -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=chance).to(device)


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.detach().cpu(), other.detach().cpu(), rtol=1e-9, atol=1e-12)


class Tower(nn.Module):
    """Layers on `owners` workers, the first of which is this one, each on an accelerator."""

    def __init__(self, here: str | torch.device, there: torch.device, owners: int, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            layer(i).to(here) if i % owners == 0 else RemoteModule(f"w{i % owners}/{there}", layer, (i,))
            for i in range(count)
        )

    def forward(self, value: Tensor) -> Tensor:
        for each in self.layers:
            value = each(value)
        return value


def whole(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*map(layer, range(count)))


def same(spread: nn.Module, model: nn.Module) -> bool:
    states = spread.state_dict().values(), model.state_dict().values()
    return all(close(one, other) for one, other in zip(*states, strict=True))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs.flip(1)).square().mean()


# Modules


def gradients_of(context: int, module: rpc.RRef[nn.Module]) -> list[Tensor]:
    found = autograd.get_gradients(context)
    return [found[parameter].cpu() for parameter in module.local_value().parameters()]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mapped", MAPS)
@on_devices
def test_a_remote_module(kind: str, mapped: bool) -> None:
    here, there = places(kind)
    with group(kind, **options(mapped)):
        model = layer(3)
        for device in (here, there):
            module = RemoteModule(f"w1/{device}", layer, (3,))
            assert (module.device, module.is_device_map_set) == (str(device), mapped)
            back = {here: there, there: here}[device] if mapped else torch.device("cpu")
            for seed, start in enumerate((torch.device("cpu"), here, there) if mapped else (torch.device("cpu"),)):
                inputs = data(seed, start).requires_grad_()
                expected = model(inputs.detach().cpu())
                for result in (module(inputs), module.forward_async(inputs).wait()):
                    assert result.device == back
                    assert close(result, expected)
                wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
                with autograd.context() as context:
                    autograd.backward(context, [module(inputs).square().sum()])
                    assert autograd.get_gradients(context)[inputs].device == start
                    found = rpc.rpc_sync("w1", gradients_of, (context, module.module_rref))
                    assert all(map(close, found, wanted))


class Nested(nn.Module):
    def forward(self, pair: tuple[Tensor, dict[str, Tensor]], *, scale: Tensor) -> dict[str, Any]:
        return {"sum": pair[0] + pair[1]["other"] * scale, "device": pair[0].device, "host": torch.ones(2)}


@pytest.mark.parametrize("mapped", MAPS)
@on_devices
def test_nested_arguments_and_results(kind: str, mapped: bool) -> None:
    here, there = places(kind)
    with group(kind, **options(mapped)):
        module = RemoteModule(f"w1/{there}", Nested)
        pair = torch.ones(2), {"other": torch.ones(2, device=here if mapped else "cpu")}
        result = module(pair, scale=torch.tensor(3.0))
        assert result["device"] == there
        assert result["sum"].device == (here if mapped else torch.device("cpu"))
        assert (result["sum"].tolist(), result["host"].tolist()) == ([4.0, 4.0], [1.0, 1.0])


def call(module: RemoteModule, inputs: Tensor) -> tuple[bool, Tensor]:
    return module.is_device_map_set, module(inputs)


@on_devices
def test_a_handle_on_another_worker(kind: str) -> None:
    _, there = places(kind)
    with group(kind, 3):
        module = RemoteModule(f"w1/{there}", layer, (1,))
        for to in ("w2", "w1"):
            mapped, result = rpc.rpc_sync(to, call, (module, data(1, there)))
            assert (mapped, result.device) == (True, there)
            assert close(result, layer(1)(data(1)))


@pytest.mark.parametrize("mapped", MAPS)
@on_devices
def test_the_state_of_a_remote_module(kind: str, mapped: bool) -> None:
    here, there = places(kind)
    with group(kind, **options(mapped)):
        module, model = RemoteModule(f"w1/{there}", layer, (1,)), layer(2)
        state = module.state_dict()
        assert {each.device for each in state.values()} == {here if mapped else torch.device("cpu")}
        assert "0" in state._metadata
        assert same(module, layer(1))
        module.load_state_dict(model.state_dict())
        assert same(module, model)
        assert close(module(data(1)), model(data(1)))
        module.load_state_dict(state)
        assert same(module, layer(1))


@on_devices
def test_a_remote_module_moves(kind: str) -> None:
    here, there = places(kind)
    model = layer(1)
    with group(kind):
        module = RemoteModule("w1", layer, (1,))
        for device in (there, here, torch.device("cpu"), there):
            assert module.to(device).device == str(device)
            inputs = data(2, "cpu" if device.type == "cpu" else here)
            assert close(module(inputs), model(data(2)))
        module.float()
        assert {each.dtype for each in module.state_dict().values()} == {torch.float32}
        assert module.device == str(there)
        adopted = RemoteModule.init_from_module_rref("w1", rpc.rpc_sync("w1", referred, (1, there)))
        assert adopted.device == str(there)
        assert close(adopted(data(2, here)), model(data(2)))


def referred(seed: int, device: str | torch.device) -> rpc.RRef[Any]:
    return rpc.RRef(layer(seed).to(device))


# Optimizers

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
    "adam, one by one": (torch.optim.Adam, {"lr": 0.05, "foreach": False}),
}


@pytest.mark.parametrize("rides", [False, True])
@pytest.mark.parametrize("hogwild", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_devices
def test_steps_give_the_numbers_of_the_host(kind: str, name: str, hogwild: bool, rides: bool) -> None:
    here, there = places(kind)
    make, options = OPTIMIZERS[name]
    with group(kind, 3, share=hogwild):
        spread, model = Tower(here, there, 3), whole()
        optimizer = DistributedOptimizer.for_module(make, spread, hogwild=hogwild, **options)
        reference = make(model.parameters(), **options)
        for seed in range(6):
            with autograd.context() as context:
                loss = loss_of(spread, data(seed, here))
                if rides:
                    autograd.backward(context, loss, step=optimizer)
                else:
                    autograd.backward(context, loss)
                    optimizer.step(context)
            reference.zero_grad()
            loss_of(model, data(seed)).backward()
            reference.step()
        assert same(spread, model)


@pytest.mark.parametrize("mapped", MAPS)
@on_devices
def test_schedulers_accumulated_gradients_and_optimizer_state(kind: str, mapped: bool) -> None:
    here, there = places(kind)
    with group(kind, 3, **options(mapped)):
        start = here if mapped else "cpu"
        spread, model = Tower(start, there, 3), whole()
        optimizer = DistributedOptimizer.for_module(torch.optim.Adam, spread, lr=0.1)
        reference = torch.optim.Adam(model.parameters(), lr=0.1)
        schedulers = [lr_scheduler.StepLR(each, 2, 0.5) for each in (optimizer, reference)]
        for step in range(4):
            for seed, last in ((step, False), (step + 10, True)):
                with autograd.context() as context:
                    autograd.backward(context, loss_of(spread, data(seed, start)))
                    (optimizer.step if last else optimizer.accumulate)(context)
            reference.zero_grad()
            (loss_of(model, data(step)) + loss_of(model, data(step + 10))).backward()
            reference.step()
            for scheduler in schedulers:
                scheduler.step()
            optimizer.load_state_dict(optimizer.state_dict())
        assert same(spread, model)


@pytest.mark.parametrize("rides", [False, True])
@pytest.mark.parametrize("limit", [0.01, 1e6])
@on_devices
def test_clipping(kind: str, limit: float, rides: bool) -> None:
    here, there = places(kind)
    with group(kind, 3):
        spread, model = Tower(here, there, 3), whole()
        optimizer = DistributedOptimizer.for_module(torch.optim.SGD, spread, lr=0.5)
        reference = torch.optim.SGD(model.parameters(), lr=0.5)
        clipped = optimizer.clipped(limit)
        for seed in range(3):
            with autograd.context() as context:
                loss = loss_of(spread, data(seed, here))
                if rides:
                    autograd.backward(context, loss, step=clipped)
                    norm = clipped.norm
                else:
                    autograd.backward(context, loss)
                    norm = clip_grad_norm_(context, optimizer, limit)
                    optimizer.step(context)
            reference.zero_grad()
            loss_of(model, data(seed)).backward()
            assert norm is not None
            assert close(norm, nn.utils.clip_grad_norm_(model.parameters(), limit))
            reference.step()
        assert same(spread, model)


def train_alone(worker: Worker, module: nn.Module, optimizer: DistributedOptimizer, start: torch.device) -> None:
    current.enter(worker)
    with on(torch.Stream(start)):
        for seed in range(4):
            with autograd.context() as context:
                autograd.backward(context, loss_of(module, data(seed, start)))
                optimizer.step(context)


@on_devices
def test_hogwild_trainers(kind: str) -> None:
    here, there = places(kind)
    with group(kind, 4) as workers:
        module = RemoteModule(f"w1/{there}", layer, (1,))
        optimizers = [
            DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.2, hogwild=True) for _ in range(2)
        ]
        before = loss_of(module, data(0, here)).item()
        in_threads(*(partial(train_alone, workers[0], module, each, here) for each in optimizers))
        assert loss_of(module, data(0, here)).item() < before


# Pipelines


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@on_devices
def test_a_pipeline(kind: str, schedule: str) -> None:
    here, there = places(kind)
    with group(kind, 3):
        stages: list[Any] = [
            RemoteModule(f"w1/{there}", layer, (0,)),
            rpc.remote("w2", moved, (1, here)),
            layer(2).to(here),
        ]
        pipeline, model = Pipeline(stages, chunks=4, schedule=schedule), whole(3)
        optimizer = DistributedOptimizer.for_module(torch.optim.SGD, pipeline, lr=0.2, momentum=0.9)
        reference = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        for seed in range(3):
            with autograd.context() as context:
                loss = pipeline.forward_backward(context, data(seed, here), data(seed + 9, here), mse_loss)
                optimizer.step(context)
            reference.zero_grad()
            wanted = mse_loss(model(data(seed)), data(seed + 9))
            wanted.backward()
            reference.step()
            assert close(loss, wanted)
        assert same(pipeline, model)
        assert close(pipeline(data(5, here)), model(data(5)))


@on_devices
def test_tied_weights_of_stages_without_a_map_between_them(kind: str) -> None:
    here, there = places(kind)
    map_ = {here: there, there: here}
    mapped = [("w1", "w2", "w3"), ("w2",), ("w3",), ()]  # as docs/pipelines.md asks for
    with group(kind, 4, device_maps={}, of_rank=lambda rank: {"device_maps": dict.fromkeys(mapped[rank], map_)}):
        devices = [there, here, there]
        stages = [RemoteModule(f"w{rank}/{device}", layer, (rank,)) for rank, device in enumerate(devices, 1)]
        pipeline = Pipeline(stages, chunks=4, tied=[("0.0.weight", "2.0.weight")])
        model = nn.Sequential(*map(layer, (1, 2, 3)))
        model.get_submodule("2.0").weight = model.get_parameter("0.0.weight")
        optimizer = DistributedOptimizer.for_module(torch.optim.SGD, pipeline, lr=0.2, momentum=0.9)
        reference = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        for seed in range(3):
            with autograd.context() as context:
                pipeline.forward_backward(context, data(seed, here), data(seed + 9, here), mse_loss)
                optimizer.step(context)
            reference.zero_grad()
            mse_loss(model(data(seed)), data(seed + 9)).backward()
            reference.step()
        state = pipeline.state_dict()
        assert all(close(state[f"stages.{name}"], value) for name, value in model.state_dict().items())
        assert close(pipeline(data(5, here)), model(data(5)))


def moved(seed: int, device: str | torch.device) -> nn.Sequential:
    return layer(seed).to(device)


# Checkpoints


def training(here: str | torch.device, there: torch.device, owners: int) -> dict[str, Any]:
    model = Tower(here, there, owners)
    optimizer = DistributedOptimizer.for_module(torch.optim.Adam, model, lr=0.1)
    return {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler.StepLR(optimizer, 2, 0.5), "step": 0}


def train(state: dict[str, Any], device: str | torch.device) -> list[float]:
    return [step(state, lambda model: loss_of(model, data(state["step"], device))) for _ in range(3)]


@pytest.mark.parametrize("wait", [True, False])
@on_host_and_devices
def test_training_resumes_from_a_checkpoint(kind: str, wait: bool) -> None:
    """Other workers and other devices need no map for that."""
    here, there = places(kind)
    with tempfile.TemporaryDirectory() as folder:
        with group(kind, 3):
            state = training(here, there, 3)
            train(state, here)
            written = checkpoint.save(state, folder, wait=wait)
            expected = train(state, here)
            written.wait()
        with group(kind, 2, device_maps={}):
            state = training("cpu", here, 2)
            checkpoint.load(state, folder)
            assert train(state, "cpu") == pytest.approx(expected, rel=1e-9)


# References and profilers


def product(x: Tensor) -> Tensor:
    return (x * x).sum()


@on_devices
def test_backward_from_a_reference(kind: str) -> None:
    here, _ = places(kind)
    with group(kind):
        x = torch.arange(3.0, device=here, requires_grad=True)
        with autograd.context() as context:
            rpc.remote("w1", product, (x,)).backward(context)
            assert autograd.get_gradients(context)[x].tolist() == [0.0, 2.0, 4.0]
        own = rpc.remote("w0", product, (x,))
        with autograd.context() as context:
            rpc.RRef(product(x)).backward(context)
            assert autograd.get_gradients(context)[x].tolist() == [0.0, 2.0, 4.0]
        assert own.to_here().item() == 5.0
        leaf = torch.arange(3.0, device=here, requires_grad=True)
        rpc.RRef(product(leaf)).backward()
        assert leaf.grad.tolist() == [0.0, 2.0, 4.0]
