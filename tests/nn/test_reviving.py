"""Models, pipelines and optimizers whose workers are lost and restarted go on from a checkpoint."""

import pathlib
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import telegrad
import telegrad.autograd as autograd
import telegrad.checkpoint as checkpoint
import telegrad.rpc as rpc
from telegrad import errors
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer
from tests.nn.training import batch, train
from tests.nn.training import train_alone as alone
from tests.recovering import Layer
from tests.rpc.test_publishing import Crowd
from tests.test_checkpoint_values import Growing


class Outer(nn.Module):
    def __init__(self, worker: str) -> None:
        super().__init__()
        self.own = Layer(1)
        self.inner = RemoteModule(worker, Layer, (2,), restore=True)

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(self.own(value))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(1), Layer(2), Layer(3))
        self.layers[2].linear.weight = self.layers[0].linear.weight

    def forward(self, value: Tensor) -> Tensor:
        return self.layers(value)


def restart(crowd: Crowd, *names: str) -> None:
    for name in names:
        crowd.lose(name)
    for name in names:
        crowd.add(name)


def check(crowd: Crowd, folder: pathlib.Path, model: nn.Module, whole: nn.Module, *lost: str) -> None:
    """Train, save, train on, lose workers, recover and train on; compare the losses with those of the whole model."""
    optimizer = DistributedOptimizer.for_module(torch.optim.Adam, model, lr=0.05)
    state = {"model": model, "optimizer": optimizer, "step": 2}
    expected = alone(whole, 6)
    assert train(model, optimizer, range(2)) == pytest.approx(expected[:2])
    checkpoint.save(state, folder / "two")
    assert train(model, optimizer, range(2, 4)) == pytest.approx(expected[2:4])
    state["step"] = 4
    for each in lost:
        restart(crowd, each)
        telegrad.recover(state, folder / "two")
        assert state["step"] == 2
        assert train(model, optimizer, range(2, 6)) == pytest.approx(expected[2:6])
    restart(crowd, *lost)
    telegrad.recover(state, folder / "two")
    assert train(model, optimizer, range(2, 6)) == pytest.approx(expected[2:6])


def test_a_pipeline_goes_on_with_the_same_losses(crowd: Crowd, tmp_path: pathlib.Path) -> None:
    stages = [RemoteModule("w1", Layer, (1,), restore=True), RemoteModule("w2", Layer, (2,), restore=True), Layer(3)]
    check(crowd, tmp_path, Pipeline(stages, chunks=4), nn.Sequential(Layer(1), Layer(2), Layer(3)), "w1", "w2")


def test_a_stage_of_a_lost_worker_goes_on_elsewhere(crowd: Crowd, tmp_path: pathlib.Path) -> None:
    pipeline = Pipeline([RemoteModule("w1", Layer, (1,)), RemoteModule("w2", Layer, (2,))], chunks=2)
    optimizer = DistributedOptimizer.for_module(torch.optim.Adam, pipeline, lr=0.05)
    state = {"model": pipeline, "optimizer": optimizer}
    expected = alone(nn.Sequential(Layer(1), Layer(2)), 4)
    assert train(pipeline, optimizer, range(2)) == pytest.approx(expected[:2])
    checkpoint.save(state, tmp_path / "two")
    crowd.lose("w1")
    pipeline.replace(0, RemoteModule("w2", Layer, (100,)))
    telegrad.recover(state, tmp_path / "two")
    assert train(pipeline, optimizer, range(2, 4)) == pytest.approx(expected[2:])


def test_a_split_model_with_ties_goes_on_with_the_same_losses(crowd: Crowd, tmp_path: pathlib.Path) -> None:
    pipeline = Pipeline.split(
        Tied(), ["w1", "w2"], at=["layers.2"], chunks=2, restore=True, example=torch.ones(4, 4).double()
    )
    check(crowd, tmp_path, pipeline, Tied(), "w1", "w2")


@pytest.mark.parametrize("lost", ["w1", "w2"])
def test_nested_remote_modules_are_recovered(crowd: Crowd, tmp_path: pathlib.Path, lost: str) -> None:
    check(crowd, tmp_path, RemoteModule("w1", Outer, ("w2",), restore=True), nn.Sequential(Layer(1), Layer(2)), lost)


def test_a_recovered_module_has_the_mode_of_its_handle(crowd: Crowd) -> None:
    module = RemoteModule("w1", Layer, (1,), restore=lambda layer: nn.init.zeros_(layer.linear.weight))
    module.eval()
    module.recover()
    restart(crowd, "w1")
    assert rpc.rpc_sync("w1", trains, (module.get_module_rref(),))  # its first use has made it anew
    module.recover()
    assert not rpc.rpc_sync("w1", trains, (module.get_module_rref(),))
    assert module.training is False
    assert rpc.rpc_sync("w1", weight_of, (module.get_module_rref(),)).abs().sum() == 0


def trains(module: rpc.RRef[Layer]) -> bool:
    return module.local_value().training


def weight_of(module: rpc.RRef[Layer]) -> Tensor:
    return module.local_value().linear.weight.detach()


def test_a_handle_on_another_worker_finds_the_recovered_module(crowd: Crowd) -> None:
    module = RemoteModule("w1", Layer, (1,), restore=True)
    outer = RemoteModule("w2", nn.Sequential, (module,))
    value = batch(0)[0]
    with torch.no_grad():
        expected = module(value)
        restart(crowd, "w1")
        assert torch.equal(outer(value), expected)


def test_a_late_step_of_the_old_optimizer_changes_nothing(crowd: Crowd) -> None:
    module = RemoteModule("w1", Layer, (1,), restore=True)
    optimizer = DistributedOptimizer.for_module(torch.optim.Adam, module, lr=0.05)
    old = optimizer.locals["w1"]
    optimizer.recover()
    assert optimizer.locals["w1"] is not old
    before = rpc.rpc_sync("w1", weight_of, (module.get_module_rref(),)).clone()
    with autograd.context() as context_id:
        autograd.backward(context_id, module(batch(0)[0]).sum())
        with pytest.raises(errors.UsageError, match="is too late"):
            old.rpc_sync().step(context_id, {})
        assert torch.equal(rpc.rpc_sync("w1", weight_of, (module.get_module_rref(),)), before)
        optimizer.step(context_id)
    assert not torch.equal(rpc.rpc_sync("w1", weight_of, (module.get_module_rref(),)), before)


def test_clipped_steps_go_on_after_a_recovery(crowd: Crowd) -> None:
    module = RemoteModule("w1", Layer, (1,), restore=True)
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, module, lr=1.0)
    clipped = optimizer.clipped(0.5)
    restart(crowd, "w1")
    optimizer.recover()
    before = rpc.rpc_sync("w1", weight_of, (module.get_module_rref(),)).clone()
    with autograd.context() as context_id:
        autograd.backward(context_id, module(batch(0)[0]).sum(), step=clipped)
    assert clipped.norm is not None
    assert clipped.norm > 0.5
    assert not torch.equal(rpc.rpc_sync("w1", weight_of, (module.get_module_rref(),)), before)


def test_hyperparameters_and_schedulers_go_on(crowd: Crowd, tmp_path: pathlib.Path) -> None:
    module = RemoteModule("w1", Layer, (1,), restore=True)
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, module, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state: dict[str, Any] = {"model": module, "optimizer": optimizer, "scheduler": scheduler}
    train(module, optimizer, range(1))
    scheduler.step()
    checkpoint.save(state, tmp_path / "one")
    scheduler.step()
    restart(crowd, "w1")
    telegrad.recover(state, tmp_path / "one")
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.5
    train(module, optimizer, range(1))
    assert rpc.rpc_sync("w1", rate_of, (optimizer.locals["w1"],)) == 0.5


def test_state_in_the_groups_of_an_optimizer_is_recovered(crowd: Crowd, tmp_path: pathlib.Path) -> None:
    module = RemoteModule("w1", Layer, (1,), restore=True)
    optimizer = DistributedOptimizer.for_module(Growing, module, lr=0.01)
    state = {"model": module, "optimizer": optimizer}
    train(module, optimizer, range(2))
    checkpoint.save(state, tmp_path / "two")
    expected = train(module, optimizer, range(2, 5))
    for _ in range(2):
        restart(crowd, "w1")
        telegrad.recover(state, tmp_path / "two")
        assert train(module, optimizer, range(2, 5)) == pytest.approx(expected)


def rate_of(local: rpc.RRef[Any]) -> float:
    return local.local_value()._optimizer.param_groups[0]["lr"]


def test_a_module_without_restore_is_an_error_at_once(crowd: Crowd, tmp_path: pathlib.Path) -> None:
    module = RemoteModule("w1", Layer, (1,))
    checkpoint.save({"model": module}, tmp_path / "one")
    restart(crowd, "w1")
    start = time.monotonic()
    with pytest.raises(errors.CannotRestore, match="give `restore`"):
        telegrad.recover({"model": module}, tmp_path / "one")
    with pytest.raises(errors.CannotRestore, match="give `restore`"):
        module.recover()
    assert time.monotonic() - start < 5


def test_the_error_names_a_worker_that_is_not_restarted(crowd: Crowd, tmp_path: pathlib.Path) -> None:
    module = RemoteModule("w1", Layer, (1,), restore=True)
    checkpoint.save({"model": module}, tmp_path / "one")
    crowd.lose("w1")
    with pytest.raises(errors.OwnerLost, match="start worker 'w1' again"):
        telegrad.recover({"model": module}, tmp_path / "one", 0.5)


def test_recover_raises_errors_of_the_program_again(crowd: Crowd, tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.CodecError, match="mine"):
        telegrad.recover({}, tmp_path, after=errors.CodecError("mine"))
    with pytest.raises(errors.GenerationOver):  # what it has made does not return
        telegrad.recover({}, tmp_path, after=errors.GenerationOver())
    with pytest.raises(errors.WorkersFailed):
        telegrad.recover({}, tmp_path, after=errors.WorkersFailed("", {"w1": ValueError(), "w2": errors.PeerLost()}))
    failed = errors.CheckpointFailed("of one that was written in the background")
    failed.__cause__ = errors.PeerLost()
    for after in (errors.PeerLost(), failed):
        with pytest.raises(errors.UsageError, match="no complete checkpoint"):
            telegrad.recover({}, tmp_path / "none", after=after)
    failed.__cause__ = OSError("the disk is full")
    with pytest.raises(errors.CheckpointFailed):
        telegrad.recover({}, tmp_path, after=failed)
    with pytest.raises(errors.UsageError, match="save one before"):
        telegrad.recover({}, checkpoint.latest(tmp_path), after=errors.PeerLost())
