"""A checkpoint keeps values, their types, and the types of keys."""

import copy
import pathlib
import re
import resource
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR, StepLR

import telegrad
from telegrad import autograd, checkpoint
from telegrad.errors import CannotEncode, UsageError
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from tests.cluster import agents_here
from tests.trees import alike

numbers = st.integers(0, 3)
plain = st.none() | st.booleans() | numbers | st.text("ab.", max_size=3) | st.just((1, [2])) | st.just({1, 2})
tensors = st.sampled_from([torch.float32, torch.bool, torch.int64]).map(lambda dtype: torch.ones(2, dtype=dtype))
keys = st.text("ab.", max_size=3) | numbers | st.booleans() | st.tuples(numbers, st.none())


def containers(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.text("ab.", max_size=3), parts, max_size=3)
    return (
        st.lists(parts, max_size=3)
        | named
        | st.dictionaries(keys, parts, max_size=3)
        | named.map(lambda value: defaultdict(list, value))
        | st.lists(keys, max_size=4).map(Counter)
        | st.lists(parts, max_size=2).map(tuple)
    )


values = st.recursive(plain | tensors | st.sampled_from([dict, nn.Linear]), containers, max_leaves=12)


@pytest.fixture(scope="module")
def worker() -> Iterator[None]:
    with agents_here(3):
        yield


def kept(value: Any, folder: pathlib.Path, wait: bool = True) -> Any:
    checkpoint.save({"value": value}, folder, wait=wait).wait()
    state = {"value": nn.Linear}  # a plain value, which is replaced
    checkpoint.load(state, folder)
    return state["value"]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.usefixtures("worker")
def test_an_entry_that_cannot_be_pickled_is_named(tmp_path: pathlib.Path, wait: bool) -> None:
    with pytest.raises(CannotEncode, match=r"the entry 'value\.f' of the state cannot be saved: .*lambda") as caught:
        kept({"f": lambda: 1, "step": 1}, tmp_path, wait)
    assert not re.search("torch/|_write", str(caught.value))
    assert kept(2, tmp_path, wait) == 2


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.usefixtures("worker")
def test_an_entry_that_belongs_to_this_process_is_named(tmp_path: pathlib.Path, wait: bool) -> None:
    for value in (nn.Linear(1, 1).parameters(), threading.Lock()):
        with pytest.raises(CannotEncode, match=r"^the entry 'value' of the state cannot be saved: cannot pickle"):
            kept(value, tmp_path, wait)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.usefixtures("worker")
def test_a_file_that_cannot_be_written_is_named(tmp_path: pathlib.Path, wait: bool) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))  # as on a full disk, with another number
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            kept({"weights": torch.ones(1 << 16)}, tmp_path / "one", wait)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert str(tmp_path / "one") in str(caught.value)
    assert not re.search("torch/|unexpected pos", str(caught.value))
    assert not (tmp_path / "one").exists()


@settings(max_examples=60, deadline=None)
@given(value=values, wait=st.booleans())
def test_any_value_is_loaded_as_it_was_saved(
    worker: None, tmp_path_factory: pytest.TempPathFactory, value: Any, wait: bool
) -> None:
    found = kept(value, tmp_path_factory.mktemp("checkpoint") / "one", wait)
    assert alike(found, value), found


def test_an_ordered_dictionary_is_loaded_as_a_dictionary(worker: None, tmp_path: pathlib.Path) -> None:
    """Torch itself can then read the tensors of a `state_dict()`."""
    found = kept(OrderedDict(b=torch.ones(1), a=torch.zeros(1)), tmp_path)
    assert alike(found, {"b": torch.ones(1), "a": torch.zeros(1)})


class Extra(nn.Module):
    """A model with state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra: dict[Any, Any] = {"seen": {1: [], 2: {}}, "mean": torch.ones(2)}

    def get_extra_state(self) -> dict[Any, Any]:
        return self.extra

    def set_extra_state(self, state: dict[Any, Any]) -> None:
        self.extra = state

    def forget(self) -> None:
        self.extra = {}


@pytest.mark.parametrize("wait", [True, False])
def test_extra_state_of_models(worker: None, tmp_path: pathlib.Path, wait: bool) -> None:
    local, remote = Extra(), RemoteModule("w0", Extra)
    checkpoint.save({"local": local, "remote": remote}, tmp_path, wait=wait).wait()
    local.forget()
    remote.get_module_rref().rpc_sync().forget()
    checkpoint.load({"local": local, "remote": remote}, tmp_path)
    assert alike(local.extra, Extra().extra)
    assert alike(remote.get_module_rref().rpc_sync().get_extra_state(), Extra().extra)


def trained() -> tuple[torch.optim.Adam, MultiStepLR]:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    scheduler = MultiStepLR(optimizer, [2, 3])
    weight.sum().backward()
    optimizer.step()
    scheduler.step()
    return optimizer, scheduler


def test_an_optimizer_and_a_scheduler_of_torch_resume(worker: None, tmp_path: pathlib.Path) -> None:
    optimizer, scheduler = trained()
    checkpoint.save({"optimizer": optimizer, "scheduler": scheduler}, tmp_path)
    fresh = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=0.1)
    going_on = MultiStepLR(fresh, [2, 3])
    checkpoint.load({"optimizer": fresh, "scheduler": going_on}, tmp_path)
    assert alike(fresh.state_dict(), optimizer.state_dict())
    for _ in range(3):
        going_on.step()
        scheduler.step()
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.1


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Rprop])
def test_distributed_optimizers_keep_their_whole_state(worker: None, tmp_path: pathlib.Path, kind: Any) -> None:
    layer = RemoteModule("w0", nn.Linear, (2, 2))
    optimizer = DistributedOptimizer.for_module(kind, layer, lr=0.1)
    before = optimizer.state_dict()
    checkpoint.save({"optimizer": optimizer}, tmp_path)
    checkpoint.load({"optimizer": optimizer}, tmp_path)
    assert alike(optimizer.state_dict(), before)


def test_a_state_of_another_optimizer_is_refused(worker: None, tmp_path: pathlib.Path) -> None:
    layer = RemoteModule("w1", nn.Linear, (2, 2))
    saved, other, newer = (
        DistributedOptimizer.for_module(kind, layer, lr=0.1)
        for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.AdamW)
    )
    StepLR(saved, 3)
    train(layer, saved)
    checkpoint.save({"optimizer": saved}, tmp_path)
    before, told = (
        other.state_dict(),
        r"than the class SGD on w1: in group 0, only the state has \['amsgrad', 'betas', ",
    )
    with pytest.raises(UsageError, match=rf"{told}.*, and only the optimizer \['dampening', 'momentum', 'nesterov'\]$"):
        checkpoint.load({"optimizer": other}, tmp_path)
    with pytest.raises(UsageError, match=told):
        other.load_state_dict(saved.state_dict())
    assert alike(other.state_dict(), before)
    checkpoint.load({"optimizer": newer}, tmp_path)  # without the scheduler, which has added its `initial_lr`
    assert newer.param_groups[0]["initial_lr"] == 0.1


class Growing(torch.optim.Optimizer):
    """Takes larger steps each time, and keeps their size in its groups, as a number and as a tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "total": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["total"] += group["k"]
            for each in group["params"]:
                each.sub_(each.grad * group["lr"] * group["total"])


class Largest(Growing):
    """Keeps the largest weight that it has seen."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["largest"] = max(each.max().item() for each in group["params"])


def layers(*workers: str) -> list[RemoteModule]:
    return [RemoteModule(worker, nn.Linear, (2, 2)) for worker in workers]


def train(model: nn.Module, optimizer: DistributedOptimizer) -> dict[str, Tensor]:
    for _ in range(2):
        with autograd.context() as context:
            autograd.backward(context, model(torch.ones(2)).square().sum(), step=optimizer)
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("as_checkpoint", [True, False])
def test_state_in_the_groups_of_optimizers(worker: None, tmp_path: pathlib.Path, as_checkpoint: bool) -> None:
    model = nn.Sequential(*layers("w0", "w1"))
    optimizer = DistributedOptimizer.for_module(Growing, model, lr=0.01)
    saved = train(model, optimizer), optimizer.state_dict()
    checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path)
    expected = train(model, optimizer)

    def load(model: nn.Module, optimizer: DistributedOptimizer) -> None:
        if as_checkpoint:
            checkpoint.load({"model": model, "optimizer": optimizer}, tmp_path)
        else:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        assert alike(optimizer.state_dict()["param_groups"], saved[1]["param_groups"])

    elsewhere = nn.Sequential(*layers("w2", "w2"))
    there = DistributedOptimizer.for_module(Growing, elsewhere, lr=1.0)
    for each, its in [(model, optimizer), (model, optimizer), (elsewhere, there)]:
        load(each, its)
        assert alike(train(each, its), expected)
        (group,) = its.state_dict()["param_groups"]
        assert (group["lr"], group["k"], group["total"].item()) == (0.01, 4, 10)


def test_owners_with_different_values_in_a_group_are_refused(worker: None, tmp_path: pathlib.Path) -> None:
    modules = layers("w0", "w1")
    model = nn.Sequential(*modules)
    parts = [module.get_module_rref() for module in modules]
    optimizer = DistributedOptimizer(Largest, parts, lr=0.01)
    train(model, optimizer)
    with pytest.raises(UsageError, match="'w0' and 'w1' have different values of 'largest' in parameter grou"):
        checkpoint.save({"optimizer": optimizer}, tmp_path)
    apart = DistributedOptimizer(Largest, [{"params": part} for part in parts], lr=0.01)
    train(model, apart)
    checkpoint.save({"optimizer": apart}, tmp_path)
    before = apart.state_dict()
    assert before["param_groups"][0]["largest"] != before["param_groups"][1]["largest"]
    checkpoint.load({"optimizer": apart}, tmp_path)
    assert alike(apart.state_dict(), before)


class Pair(NamedTuple):
    first: Tensor
    second: int


def test_tensors_are_written_in_place(worker: None, tmp_path: pathlib.Path) -> None:
    model, weight, base = nn.Linear(2, 1), nn.Parameter(torch.ones(2)), torch.ones(3, 2)
    with torch.inference_mode():
        fixed = torch.ones(1)
    conjugate = torch.tensor([1 + 2j]).conj()
    pair = Pair(torch.tensor(4), 5)
    state: dict[str, Any] = {"weight": weight, "nested": {1: [base.t(), "text"], "pair": pair}, "fixed": fixed}
    state |= {"model": dict(model.state_dict()), "conjugate": conjugate, "step": 3}
    checkpoint.save(state, tmp_path)
    expected = copy.deepcopy(state)
    with torch.no_grad():
        for each in (*model.parameters(), weight, base, pair.first, conjugate):
            each.zero_()
    state |= {"nested": {1: [base.t(), "other"], "pair": pair._replace(second=0)}, "step": 0}
    version = weight._version
    telegrad.recover(state, tmp_path)
    assert alike(state, expected)
    assert alike(dict(model.state_dict()), expected["model"])
    assert all(state[name] is value for name, value in {"weight": weight, "fixed": fixed}.items())
    assert state["nested"]["pair"].first is pair.first
    assert torch.equal(base, torch.ones(3, 2))
    assert weight._version > version


FLOATS = "torch.float32 tensor of shape"


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        (torch.ones(2, 3), torch.zeros(3, 2), rf"^value in the state is a {FLOATS} \(3, 2\), and a {FLOATS} \(2, 3\)"),
        (torch.ones(1), torch.zeros(()), rf"a {FLOATS} \(\), and a {FLOATS} \(1,\) in the checkpoint: nothing was l"),
        (torch.ones(2), torch.zeros(2, dtype=torch.int64), rf"a torch.int64 tensor of shape \(2,\), and a {FLOATS}"),
        (torch.ones(2) * 1j, torch.zeros(2), r"\(2,\), and a torch.complex64 tensor of shape \(2,\) in the checkpoint"),
        (torch.ones(2), torch.zeros(2, device="meta"), "is a meta tensor, and a torch.float32 tensor"),
        ((torch.eye(2).to_sparse(),), (torch.eye(2).to_sparse(),), "^value.0 in the state is a torch.sparse_coo ten"),
        (3, torch.zeros(()), r"\(\), and of type int in the checkpoint"),
        ([torch.ones(1)], [torch.zeros(1)] * 2, "of type list and length 2, and of type list and length 1 in the"),
        ({"a": torch.ones(1)}, {"a": torch.zeros(1), "b": torch.zeros(1)}, "^the checkpoint has no value.b: nothing"),
        (torch.ones(2, 3), torch.zeros(3).expand(2, 3), "^elements of value in the state share memory: give a ten"),
        (torch.ones(2, 3), torch.zeros(4).as_strided((2, 3), (1, 1)), "^elements of value in the state share memory"),
    ],
)
def test_a_tensor_that_cannot_be_written_leaves_the_state_as_it_was(
    worker: None, tmp_path: pathlib.Path, saved: Any, own: Any, message: str
) -> None:
    layer = RemoteModule("w1", nn.Linear, (1, 1))
    checkpoint.save({"early": torch.ones(1), "layer": layer, "step": 3, "value": saved}, tmp_path)
    layer.load_state_dict({"weight": torch.zeros(1, 1), "bias": torch.zeros(1)})
    state = {"early": torch.zeros(1), "layer": layer, "step": 0, "value": own}
    before = dict(state)
    with pytest.raises(UsageError, match=message):
        checkpoint.load(state, tmp_path)
    assert all(state[key] is value for key, value in before.items())
    assert not any(value.any() for value in (before["early"], *layer.state_dict().values()))


class Layer(nn.Linear):
    """A layer that differs from the default one in `fault`."""

    def __init__(self, fault: str = "") -> None:
        dtype = torch.float64 if fault == "type" else None
        super().__init__(2, 3 if fault == "shape" else 2, dtype=dtype)
        if fault == "missing":
            self.other = nn.Parameter(torch.zeros(1))


FAULTS = {
    "shape": rf"^m\.1\.weight on worker 'WHERE' is a {FLOATS} \(3, 2\), and a {FLOATS} \(2, 2\) in .*: nothing was",
    "type": rf"^m\.1\.weight on worker 'WHERE' is a torch\.float64 tensor .*, and a {FLOATS} .*: nothing was loaded",
    "missing": r"^the checkpoint in '.*' has no m\.1\.other \(on worker 'WHERE'\): nothing was loaded$",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("places", [("", ""), ("w1", "w1"), ("w1", "w2"), ("w1", ""), ("", "w1")], ids="-".join)
def test_a_part_that_does_not_fit_leaves_all_owners_as_they_were(
    worker: None, tmp_path: pathlib.Path, fault: str, places: tuple[str, str]
) -> None:
    def model(fault: str = "") -> nn.Module:
        faults = ["", fault]
        pairs = zip(places, faults, strict=True)
        return nn.Sequential(*(RemoteModule(at, Layer, (its,)) if at else Layer(its) for at, its in pairs))

    checkpoint.save({"m": model(), "step": 3, "value": torch.ones(1)}, tmp_path)
    own, value = model(fault), torch.zeros(1)
    before = copy.deepcopy(own.state_dict())
    state = {"m": own, "step": 0, "value": value}
    with pytest.raises(UsageError, match=FAULTS[fault].replace("WHERE", places[1] or "w0")):
        checkpoint.load(state, tmp_path)
    assert alike(own.state_dict(), before)
    assert state == {"m": own, "step": 0, "value": value}
    assert not value.any()


def test_an_optimizer_that_does_not_fit_leaves_the_state_as_it_was(worker: None, tmp_path: pathlib.Path) -> None:
    def trained(*sizes: int) -> tuple[nn.Module, DistributedOptimizer]:
        made = nn.Sequential(*(RemoteModule("w1", nn.Linear, (2, size)) for size in sizes))
        optimizer = DistributedOptimizer.for_module(torch.optim.Adam, made, lr=0.1)
        train(made, optimizer)
        return made, optimizer

    model, optimizer = trained(2, 2)
    checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path)
    train(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    fresh = DistributedOptimizer.for_module(torch.optim.Adam, trained(2, 1)[0])
    checkpoint.load({"optimizer": fresh}, tmp_path)  # it has no state yet
    for other, told in [
        (trained(2)[1], "this state has other parameters"),
        (
            trained(2, 1)[1],
            r"^optimizer\.state\.1\.weight\.exp_avg on worker 'w1' is a .* \(1, 2\), and .* \(2, 2\) in",
        ),
    ]:
        with pytest.raises(UsageError, match=told):
            checkpoint.load({"model": model, "optimizer": other}, tmp_path)
        assert alike(model.state_dict(), before)
    checkpoint.load({"model": model, "optimizer": optimizer}, tmp_path)
    assert not alike(model.state_dict(), before)


@pytest.mark.parametrize("own", [torch.zeros(3), torch.zeros(2, dtype=torch.int64), 5], ids=str)
def test_extra_state_is_replaced_by_a_tensor_of_any_form(worker: None, tmp_path: pathlib.Path, own: Any) -> None:
    model = Extra()
    for saved in (torch.ones(2), {"a": 1}):
        model.set_extra_state(saved)  # type: ignore[arg-type]
        checkpoint.save({"model": model}, tmp_path)
        model.set_extra_state(own)
        checkpoint.load({"model": model}, tmp_path)
        assert alike(model.extra, saved)


class Plain(torch.Tensor):
    pass


class Held(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.eye(2).to_sparse() if layout == "sparse" else torch.ones(2, device="meta"))


def test_a_state_that_contains_itself_is_refused(worker: None, tmp_path: pathlib.Path) -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless
    with pytest.raises(UsageError, match="'d' in the state contains itself"):
        checkpoint.save({"d": endless}, tmp_path / "1")


@pytest.mark.parametrize("inside", [lambda part: {"a": part}, lambda part: [{"a": part}], lambda part: (0, part)])
def test_a_model_within_a_container_is_refused(inside: Any, tmp_path: pathlib.Path) -> None:
    for part in (nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)])):
        for use in (checkpoint.save, checkpoint.load):
            with pytest.raises(UsageError, match=rf"part.* is a {type(part).__name__} in a .* name of its own"):
                use({"part": inside(part)}, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_cannot_be_saved_are_named(worker: None, tmp_path: pathlib.Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"a": {"b": [torch.eye(2).to_sparse()]}}, "a.b.0, a torch.sparse_coo tensor"),
        ({"a": nested}, "a, a nested tensor"),
        ({"a": quantized}, "a, a quantized tensor"),
        ({"a": torch.ones(1, device="meta")}, "a, a meta tensor"),
        ({"a": torch.ones(1).as_subclass(Plain)}, "a, a Plain tensor"),
        ({"model": Held("meta")}, "model.table, a meta tensor"),
        ({"model": nn.LazyLinear(1)}, "model.weight, a lazy tensor"),
        ({"model": RemoteModule("w1", Held, ("sparse",))}, "model.table, a torch.sparse_coo tensor"),
    ]
    for state, told in refused:
        for wait in (True, False):
            with pytest.raises(UsageError, match=f"^a checkpoint cannot contain {told}: save a dense tensor with its"):
                checkpoint.save(state, tmp_path, wait=wait)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["w0", "w1", None])
def test_keys_that_give_two_values_one_name_are_named(worker: None, tmp_path: pathlib.Path, where: str | None) -> None:
    part = RemoteModule(where, nn.Linear, (1, 1)) if where else {"bias": torch.ones(1)}
    checkpoint.save({"a.b": torch.ones(1), "a": part}, tmp_path)
    with pytest.raises(UsageError, match=r"^the keys 'a.*' and 'a.*' of the state both have a value 'a.bias' in"):
        checkpoint.save({"a.bias": torch.ones(1), "a": part}, tmp_path)
