"""Checkpoints of models that are distributed over workers."""

import os
import pathlib
import pickle
import shutil
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.optim.lr_scheduler import StepLR

import telegrad.autograd as autograd
import telegrad.checkpoint as checkpoint
from telegrad._core.worker import current
from telegrad.checkpoint import Saver
from telegrad.errors import CheckpointFailed, NotInitialized, UsageError, WorkersFailed
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import remote
from tests.cluster import PATIENCE, agents_here

Saved = tuple[pathlib.Path, dict[str, torch.Tensor], list[float], list[float]]


class Body(nn.Module):
    """Part of a model, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(value)).tanh()


class Model(nn.Module):
    """A model of four parts: three on the workers `places`, in turn, and a local one."""

    def __init__(self, places: list[str]) -> None:
        super().__init__()
        at = [places[number % len(places)] for number in range(3)]
        self.first = RemoteModule(at[0], Body)
        self.second = remote(at[1], Body)
        self.rest = nn.ModuleList([RemoteModule(at[2], Body)])
        self.head = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.head(self.rest[0](self.second.rpc_sync()(self.first(value))))


class Whole(nn.Module):
    """The same model in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rest = Body(), Body(), nn.ModuleList([Body()])
        self.head = nn.Linear(4, 1, dtype=torch.float64)


def training(places: list[str]) -> dict[str, Any]:
    torch.manual_seed(5)
    model = Model(places)
    optimizer = DistributedOptimizer.for_module(torch.optim.Adam, model, lr=0.05)
    return {"model": model, "optimizer": optimizer, "scheduler": StepLR(optimizer, 3, 0.5), "step": 0}


def train(state: dict[str, Any], steps: int) -> list[float]:
    """Take steps with data that depends on the number of the step alone; return the losses."""
    losses = []
    for _ in range(steps):
        inputs = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(state["step"]))
        losses.append(step(state, lambda model, x=inputs: (model(x) - x.sum(1, keepdim=True)).square().mean()))
    return losses


def step(state: dict[str, Any], loss_of: Callable[..., torch.Tensor]) -> float:
    """Take a step with the loss `loss_of(model)`; return the loss."""
    with autograd.context() as context:
        loss = loss_of(state["model"])
        autograd.backward(context, loss)
        state["optimizer"].step(context)
    state["scheduler"].step()
    state["step"] += 1
    return loss.item()


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> Saved:
    """Save a checkpoint of a training on four workers; return it with later and earlier losses."""
    with agents_here(4):
        state = training(["w1", "w2", "w3"])
        before = train(state, 5)
        checkpoint.save(state, tmp_path / "five")
        copied = {name: value.clone() for name, value in state["model"].state_dict().items()}
        return tmp_path / "five", copied, train(state, 5), before


@pytest.mark.parametrize("places", [["w1"], ["w0"], ["w1", "w0", "w2", "w4"]], ids=len)
def test_training_resumes_on_other_workers(saved: Saved, places: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, after, before = saved
    reads, read = [], FileSystemReader.read_metadata

    def counted(reader: FileSystemReader) -> Any:
        reads.append(current.here().me.name)
        return read(reader)

    with agents_here(5):
        state = training(places)
        monkeypatch.setattr(FileSystemReader, "read_metadata", counted)
        checkpoint.load(state, path)
        assert sorted(reads) == sorted([*{*places[:3], "w0"}, "w0"])  # once by the driver and each owner
        assert state["step"] == 5
        assert state["optimizer"].param_groups[0]["lr"] == 0.025
        went_on = train(state, 5)
    assert went_on == pytest.approx(after, rel=1e-12)
    assert before != pytest.approx(after, rel=1e-3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_can_load_a_checkpoint(saved: Saved) -> None:
    path, copied, _, _ = saved
    whole = Whole()
    dcp.load({"model": whole}, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(whole.state_dict()[name], value) for name, value in copied.items())
    assert len(whole.state_dict()) == 23
    assert len({file.name for file in path.iterdir()}) == 5  # a file of each worker, and the metadata


def test_missing_checkpoints_and_missing_entries(saved: Saved, tmp_path: pathlib.Path) -> None:
    with agents_here(2):
        with pytest.raises(UsageError, match="no complete checkpoint"):
            checkpoint.load({"step": 0}, tmp_path / "never")
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match=r"no complete checkpoint in .*file': .*Not a directory"):
            checkpoint.load({"step": 0}, tmp_path / "file")
        state = {"epoch": 7}
        with pytest.raises(UsageError, match="has no epoch"):
            checkpoint.load(state, saved[0])
        assert state == {"epoch": 7}
        with pytest.raises(UsageError, match=r"has no other\.bias, other\.weight"):
            checkpoint.load({"other": RemoteModule("w1", nn.Linear, (2, 2))}, saved[0])
        with pytest.raises(UsageError, match="other parameters"):
            checkpoint.load({"optimizer": DistributedOptimizer.for_module(torch.optim.Adam, nn.Linear(2, 2))}, saved[0])


def test_an_incomplete_checkpoint_is_ignored_and_the_older_one_stays(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agents_here(3):
        state = training(["w1", "w2"])
        checkpoint.save({**state, "step": 1}, tmp_path / "old")
        with monkeypatch.context() as patched:
            patched.setattr(Saver, "write", broken)
            for name in ("old", "new"):
                with pytest.raises(WorkersFailed, match=r"3 of 3 workers failed[\s\S]*no space"):
                    checkpoint.save({**state, "step": 2}, tmp_path / name)
        with pytest.raises(UsageError, match="no complete checkpoint"):
            checkpoint.load(state, tmp_path / "new")
        checkpoint.load(state, tmp_path / "old")
        assert state["step"] == 1
        checkpoint.save({**state, "step": 3}, tmp_path / "old")
        checkpoint.load(state, tmp_path / "old")
        assert state["step"] == 3
        assert len(list((tmp_path / "old").iterdir())) == 4  # files of older checkpoints are removed


def broken(self: Saver, plan: dcp.SavePlan) -> NoReturn:
    raise OSError("no space")


def test_a_relative_path_is_that_of_the_folder_in_which_save_was_called(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, moved = Saver.write, threading.Event()

    def write_later(self: Saver, plan: dcp.SavePlan) -> Any:
        assert moved.wait(PATIENCE)
        return write(self, plan)

    with agents_here(1):
        monkeypatch.setattr(Saver, "write", write_later)
        for name in ("here", "there"):
            (tmp_path / name / "runs/1").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "here")
        future = checkpoint.save({"x": torch.ones(2)}, "runs/1", wait=False)
        monkeypatch.chdir(tmp_path / "there")
        moved.set()
        assert future.wait() == "runs/1"
        assert checkpoint.latest("runs") is None
        state = {"x": torch.zeros(2)}
        checkpoint.load(state, tmp_path / "here/runs/1")
        assert state["x"].tolist() == [1, 1]


def test_files_of_an_owner_that_the_caller_does_not_see_are_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Saver.write

    def write_elsewhere(self: Saver, plan: dcp.SavePlan) -> Any:
        written = write(self, plan)
        for result in written:
            (tmp_path / "run" / result.storage_data.relative_path).unlink(missing_ok=True)
        return written

    with agents_here(2):
        monkeypatch.setattr(Saver, "write", write_elsewhere)
        with pytest.raises(UsageError, match=r"worker 'w1' wrote .*under the same path"):
            checkpoint.save({"m": RemoteModule("w1", nn.Linear, (2, 2))}, tmp_path / "run")
        assert checkpoint.latest(tmp_path) is None
    with pytest.raises(NotInitialized):
        checkpoint.load({}, tmp_path / "run")


def test_a_wrong_state_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    for function in (checkpoint.save, checkpoint.load):
        states: list[tuple[Any, str]] = [
            (nn.Linear(2, 2), "not Linear"),
            ({"m": 1, 5: "five"}, "and its key 5 is not a string"),
            ([1], r"not \[1\]"),
        ]
        for state, fault in states:
            name = function.__name__
            with pytest.raises(
                UsageError, match=rf'by names, {fault}: write checkpoint\.{name}\(\{{"model": model\}}, folder\)'
            ):
                function(state, tmp_path)
        with pytest.raises(UsageError, match=r"give its path \(checkpoint_id\), not Linear"):
            function({}, nn.Linear(2, 2))  # type: ignore[arg-type]


def test_files_that_are_not_regular_are_refused_without_waiting(tmp_path: pathlib.Path) -> None:
    with agents_here(2):
        state = {"layer": RemoteModule("w1", nn.Linear, (2, 2)), "step": 1}
        for name in (".metadata", "*.distcp"):
            path = tmp_path / f"of {name.strip('*.')}"
            checkpoint.save(state, path)
            for file in path.glob(name):
                file.unlink()
                os.mkfifo(file)
            with pytest.raises(Exception, match=r"it is not a regular file: '.*(\.metadata|\.distcp)'"):
                checkpoint.load(state, path)
        for spoil in (lambda file: os.truncate(file, 100), os.unlink, _name_another_function):
            checkpoint.save(state, tmp_path / "spoiled")
            for file in (tmp_path / "spoiled").glob("*.distcp"):
                spoil(file)
            with pytest.raises(CheckpointFailed, match=r"files of .*spoiled' are missing or damaged") as caught:
                checkpoint.load(state, tmp_path / "spoiled")
            assert "weights_only" not in str(caught.value)
        shutil.rmtree(tmp_path / "spoiled")
        assert checkpoint.latest(tmp_path) == str(tmp_path / "of distcp")
        (tmp_path / "other").mkdir()
        for content in (b"", b"[settings]", pickle.dumps([1]), pickle.dumps(b"text")[:-4]):
            (tmp_path / "other" / ".metadata").write_bytes(content)
            with pytest.raises(
                CheckpointFailed, match=r"\.metadata in '.*other' does not belong .*: \w+(: \S.*)?\. Load"
            ):
                checkpoint.load(state, tmp_path / "other")
        checkpoint.save({**state, "x": torch.ones(5)}, tmp_path / "other")
        content = (tmp_path / "other" / ".metadata").read_bytes()
        for part in (b"properties", b"size\x94", b"chunks", b"offsets", b"float32", b"storage_data", b"sizes"):
            (tmp_path / "other" / ".metadata").write_bytes(content.replace(part, part[:-2] + b"_" + part[-1:]))
            with pytest.raises(CheckpointFailed, match=r"(damaged|does not belong to .*): \w+(: .*)?\. "):
                checkpoint.load({**state, "x": torch.zeros(5)}, tmp_path / "other")


def _name_another_function(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"))
