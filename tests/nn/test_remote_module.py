"""Modules that live on other workers."""

import copy
import gc
import inspect
import io
import linecache
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import telegrad.autograd as autograd
from telegrad._core.modules.module_host import parse_place
from telegrad._core.worker import current
from telegrad.errors import TelegradWarning, UnknownWorker, UsageError
from telegrad.nn import RemoteModule
from telegrad.rpc import RRef, debug_info, get_worker_info, remote, rpc_sync

pytestmark = pytest.mark.usefixtures("here")


class Words(nn.Module):
    shift: Tensor

    def __init__(self, factor: int, shift: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(factor)))
        self.register_buffer("shift", torch.full((2,), float(shift)))

    def forward(self, tensor: Tensor, number: int, word: str = "default") -> tuple[str, int, Tensor]:
        return word, number, tensor * self.weight + self.shift if self.training else tensor

    def where(self) -> str:
        return current.agent().name

    def fails(self) -> NoReturn:
        raise KeyError("inside")


def make_norm() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(2))


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.far = RemoteModule("w1", nn.Linear, (3, 4))
        self.near = nn.Linear(4, 1)

    def forward(self, value: Tensor) -> Tensor:
        return self.near(self.far(value))


def make_linear(inputs: int, outputs: int, device: str | None = None) -> nn.Linear:
    return nn.Linear(inputs, outputs, device=device)


def call(module: "Double | RemoteModule", *args: Tensor | int) -> tuple[Any, str, bool]:
    return module(*args), module.on, module.training


def of_module(module: RRef[nn.Module], name: str) -> bool:
    return getattr(module.local_value(), name)


@pytest.mark.parametrize("place", ["w1", "w1/cpu", "rank:1", "rank:1/cpu"])
def test_forward_runs_where_the_module_lives(place: str) -> None:
    module = RemoteModule(place, Words, (3,), {"shift": 1})
    assert (module.on, module.device) == ("w1", "cpu")
    word, number, tensor = module(torch.ones(2), 5)
    assert (word, number, tensor.tolist()) == ("default", 5, [4, 4])
    assert module.forward(torch.ones(2), number=6, word="x")[:2] == ("x", 6)
    assert module.forward_async(torch.ones(2), 7, word="y").wait()[:2] == ("y", 7)
    assert module.get_module_rref().rpc_sync().where() == "w1"


def test_forward_has_the_signature_of_the_module() -> None:
    module = RemoteModule("w1", Words, (3,))
    assert list(inspect.signature(module.forward).parameters) == ["tensor", "number", "word"]
    assert inspect.signature(module.forward_async).parameters["word"].default == "default"
    assert RemoteModule("w1", make_linear, (2, 3))(torch.ones(2)).shape == (3,)


def test_an_error_of_the_module_is_raised_at_the_caller() -> None:
    module = RemoteModule("w1", Words, (3,))
    with pytest.raises(KeyError, match="inside"):
        module.get_module_rref().rpc_sync().fails()
    with pytest.raises(TypeError, match="number"):
        module(torch.ones(2))


def test_wrong_classes_and_workers() -> None:
    with pytest.raises(TypeError):
        RemoteModule("w1", nn.Linear)
    with pytest.raises(UnknownWorker):
        RemoteModule("nobody/cpu", nn.Linear, (1, 1))


def gradients_of(context: int, module: RRef[nn.Module]) -> list[Tensor]:
    found = autograd.get_gradients(context)
    return [found[parameter] for parameter in module.local_value().parameters()]


def test_a_remote_module_from_a_reference() -> None:
    reference = remote("w1", nn.Linear, (2, 3))
    module = RemoteModule.init_from_module_rref("w1/cpu", reference)
    assert module.module_rref is reference or module.module_rref._handle.id == reference._handle.id
    assert module(torch.ones(2)).shape == (3,)
    elsewhere = remote("w1", make_linear, (2, 3), {"device": "meta"})
    assert RemoteModule.init_from_module_rref("w1", elsewhere).device == "meta"
    assert RemoteModule.init_from_module_rref("w1/meta", reference).device == "meta"


def test_a_handle_can_be_sent_to_another_worker() -> None:
    module: Any = RemoteModule("w1", Words, (3,)).eval()
    module.mine = "stays"
    result, on, training = rpc_sync("w2", call, (module, torch.ones(2), 4))
    assert (result[1], on, training) == (4, "w1", False)
    assert not rpc_sync("w2", hasattr, (module, "mine"))


def test_a_module_that_contains_a_handle_can_be_sent() -> None:
    parent = Parent()
    value = torch.ones(3)
    assert torch.equal(rpc_sync("w2", torch.nn.Module.__call__, (parent, value)), parent(value))


class Double(RemoteModule):
    def forward(self, *args: Tensor) -> Tensor:
        return super().forward(*args) * 2


def test_a_subclass_of_remote_module() -> None:
    module = Double("w1", nn.Identity)
    assert module(torch.ones(1)) == 2
    assert rpc_sync("w2", call, (module, torch.ones(1)))[0] == 2


def test_train_and_eval_reach_the_module() -> None:
    parent = Parent()
    for mode in (False, True):
        parent.train(mode)
        assert parent.far.training is mode
        assert rpc_sync("w1", of_module, (parent.far.module_rref, "training")) is mode
    assert parent.far.eval() is parent.far
    assert not rpc_sync("w1", of_module, (parent.far.module_rref, "training"))


def test_state() -> None:
    parent, other = Parent(), Parent()
    state: Any = parent.state_dict()
    assert list(state) == ["far.weight", "far.bias", "near.weight", "near.bias"]
    assert "far" in state._metadata
    other.load_state_dict(state)
    assert torch.equal(parent(torch.ones(3)), other(torch.ones(3)))
    with io.BytesIO() as file:
        torch.save(state, file)
    words = RemoteModule("w1", Words, (3,))
    assert list(words.state_dict()) == ["weight", "shift"]
    words.load_state_dict({"weight": torch.zeros(2), "shift": torch.ones(2)})
    assert words(torch.ones(2), 1)[2].tolist() == [1, 1]


def test_state_that_does_not_fit() -> None:
    parent = Parent()
    state = parent.state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key.*"far\.bias"[\s\S]*Unexpected key.*"far\.other"'):
        parent.load_state_dict(
            {**{name: state[name] for name in state if name != "far.bias"}, "far.other": state["far.bias"]}
        )
    missing, unexpected = parent.load_state_dict({"far.other": torch.ones(1)}, strict=False)
    assert "far.weight" in missing
    assert unexpected == ["far.other"]
    with pytest.raises(RuntimeError, match=r"on worker 'w1'[\s\S]*size mismatch for weight"):
        parent.load_state_dict({**state, "far.weight": torch.ones(1)})


@pytest.mark.parametrize("inside", [False, True])
def test_the_owner_gets_the_versions_of_a_state(inside: bool) -> None:
    """BatchNorm ignores a missing name in a state of its first version."""
    module = RemoteModule("w1", make_norm)
    model = nn.Sequential(module) if inside else module
    state = model.state_dict()
    (name,) = [each for each in state if each.endswith("num_batches_tracked")]
    model.load_state_dict(dict(state) | {name: torch.tensor(3)})
    del state[name]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{name}"'):
        model.load_state_dict(state)
    model.load_state_dict(dict(state))  # has no versions
    assert model.state_dict()[name].item() == 3


def test_conversions_reach_the_module() -> None:
    parent = Parent()
    parent.double()
    assert {value.dtype for value in parent.state_dict().values()} == {torch.float64}
    assert parent(torch.ones(3, dtype=torch.float64)).dtype == torch.float64
    parent.to(torch.float32)
    assert parent(torch.ones(3)).dtype == torch.float32
    far = parent.far
    assert far.to("meta") is far
    assert far.device == "meta"
    assert far.state_dict()["weight"].is_meta
    assert RemoteModule("w1", nn.Identity).to("meta").device == "meta"
    assert RemoteModule("w1/meta", nn.Linear, (2, 2)).state_dict()["weight"].is_meta


def test_apply_and_other_methods_for_the_whole_module() -> None:
    parent = Parent()

    def clear(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)

    parent.apply(clear)
    state = parent.state_dict()
    assert not state["far.weight"].any()
    assert not state["near.weight"].any()
    parent.far.requires_grad_(False)
    assert not parent.far(torch.ones(3)).requires_grad
    parent.far.zero_grad()


def test_hooks_of_the_handle_run_at_the_caller() -> None:
    seen = []
    module = RemoteModule("w1", nn.Linear, (2, 2))
    module.register_forward_pre_hook(lambda module, args: seen.append("before"))
    module.register_forward_hook(lambda module, args, result: seen.append("after"))
    module.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward"))
    with autograd.context() as context:
        autograd.backward(context, module(torch.ones(2, requires_grad=True)).sum())
    assert seen == ["before", "after", "backward"]


def add_hook(module: RRef[nn.Module]) -> None:
    module.local_value().register_forward_hook(lambda module, args, result: result + 100)


def test_hooks_of_the_module_run_on_its_worker() -> None:
    module = RemoteModule("w1", nn.Identity)
    rpc_sync("w1", add_hook, (module.get_module_rref(),))
    assert module(torch.zeros(1)) == 100


def test_a_remote_module_inside_of_an_ordinary_module() -> None:
    parent = Parent()
    assert "(far): RemoteModule(Linear on w1/cpu)" in repr(parent)
    assert [name for name, _ in parent.named_parameters()] == ["near.weight", "near.bias"]
    assert list(parent.children()) == [parent.far, parent.near]
    assert [type(each) for each in parent.far.modules()] == [RemoteModule]
    parent.zero_grad()


def test_remote_parameters() -> None:
    module = RemoteModule("w1", nn.Sequential, (nn.Linear(2, 3), nn.Linear(3, 1)))
    references = module.remote_parameters()
    assert [reference.owner_name() for reference in references] == ["w1"] * 4
    assert isinstance(references[0].to_here(), nn.Parameter)
    assert module.remote_parameters(recurse=False) == []


def test_attributes_of_the_module_are_not_those_of_the_handle() -> None:
    module = RemoteModule("w1", Words, (3,))
    with pytest.raises(AttributeError, match=r"get_module_rref\(\)\.rpc_sync\(\)\.where"):
        module.where()
    with pytest.raises(UsageError, match="only be pickled when using RPC"):
        torch.save(module, io.BytesIO())
    with pytest.raises(UsageError, match=r"a RemoteModule cannot be copied.*Words lives on worker 'w1'.*state_dict"):
        copy.deepcopy(module)


def test_the_module_is_released_with_its_last_handle() -> None:
    module = RemoteModule("w1", Words, (3,))
    gc.collect()  # frees references of other tests
    before = debug_info()["users"]
    del module
    gc.collect()
    assert debug_info()["users"] == before - 1


@pytest.mark.cuda
def test_on_a_device_of_its_own() -> None:
    module = RemoteModule("w1/cuda:0", nn.Linear, (3, 2))
    with autograd.context() as context:
        result = module(torch.ones(2, 3))
        assert result.device.type == "cpu"
        autograd.backward(context, result.sum())
        (bias, weight) = rpc_sync("w1", gradients_of, (context, module.get_module_rref()))[::-1]
    assert bias.tolist() == [2, 2]
    assert weight.shape == (2, 3)


def test_lost_gradients_are_warned_of_once_per_line_of_the_program() -> None:
    model = nn.Sequential(nn.Linear(3, 3), RemoteModule("w1", nn.Linear, (3, 4)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(2, 3)).sum()
    (only,) = said
    assert issubclass(only.category, TelegradWarning)
    assert "Linear on worker 'w1' was called outside of an autograd context" in str(only.message)
    assert "model(torch.ones(2, 3))" in linecache.getline(only.filename, only.lineno)


def test_lost_gradients_are_warned_of_in_a_context_that_has_ended() -> None:
    module = RemoteModule("w1", nn.Linear, (3, 4))
    with autograd.context():
        later = copy_context()
    with pytest.warns(TelegradWarning, match="outside of an autograd context"):
        later.run(module, torch.ones(2, 3))


def test_lost_gradients_in_a_thread_pool_are_warned_of_at_the_program_or_by_the_function() -> None:
    module = RemoteModule("w1", nn.Linear, (3, 4))
    with autograd.context(), ThreadPoolExecutor(1) as pool, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pool.submit(module, torch.ones(2, 3)).result()
        pool.submit(lambda: [*map(module, torch.ones(1, 3))]).result()
        pool.submit(module.forward, torch.ones(2, 3)).result()
    by_name, line, forward = said
    assert by_name.filename == "<RemoteModule(Linear).forward, in a thread pool>"
    assert "map(module, torch.ones(1, 3))" in linecache.getline(line.filename, line.lineno)
    assert forward.filename.startswith("<RemoteModule"), forward.filename


def test_an_error_of_the_call_is_not_preceded_by_that_warning() -> None:
    module = RemoteModule("w1", nn.Linear, (3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module(torch.ones(2, 5))


def test_there_is_no_warning_if_no_gradient_is_needed() -> None:
    module = RemoteModule("w1", nn.Linear, (3, 4))
    frozen = RemoteModule("w1", nn.Linear, (3, 4)).requires_grad_(False)
    bare = RemoteModule("w1", nn.Identity)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with autograd.context():
            module(torch.ones(2, 3))
        with torch.no_grad():
            module(torch.ones(2, 3))
        module.eval()(torch.ones(2, 3))
        frozen(torch.ones(2, 3))
        bare(torch.ones(2, 3))
        with pytest.raises(TelegradWarning, match="Identity"):
            bare.forward_async(torch.ones(2, 3, requires_grad=True))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((nn.Linear(2, 1),), r"write RemoteModule\(place, Linear, args, kwargs\)"),
        (("Linear",), r"takes a class, or a function that creates the module \(module_cls\), not 'Linear'"),
        ((nn.Linear, (3)), r"must be a tuple, not 3: write \(value,\), with a comma"),
        ((nn.Linear, "32"), r"must be a tuple, not '32'"),
        ((nn.Linear, torch.ones(2, 2)), r"must be a tuple, not Tensor"),
        ((nn.Linear, {"in_features": 2, "out_features": 1}), r"write kwargs=\{...\} for arguments by name"),
        ((nn.Linear, (2, 1), ("bias",)), r"must be a dictionary from argument names to values, not \('bias',\)"),
        ((nn.Linear, (2, 1), {1: False}), "must be strings, not 1"),
    ],
)
def test_wrong_arguments_are_refused_at_the_caller(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        RemoteModule("w1", *arguments)


def test_a_worker_may_be_named_by_its_info_but_not_by_a_bare_rank() -> None:
    assert RemoteModule(get_worker_info("w1"), nn.Linear, (2, 1)).on == "w1"
    with pytest.raises(UsageError, match="write 'rank:1'"):
        RemoteModule(1, nn.Linear, (2, 1))  # type: ignore[arg-type]


# Places for modules


@pytest.mark.parametrize(
    ("text", "worker", "device"),
    [
        ("trainer0/cpu", "trainer0", "cpu"),
        ("trainer0", "trainer0", None),
        ("ps0/cuda:0", "ps0", "cuda:0"),
        ("rank:1/cuda:1", 1, "cuda:1"),
        ("rank:12", 12, None),
        ("a:b/meta", "a:b", "meta"),
    ],
)
def test_places(text: str, worker: int | str, device: str | None) -> None:
    assert parse_place(text) == (worker, torch.device(device) if device else None)


@pytest.mark.parametrize("text", ["", "cpu", "cuda:0", "/cpu", "a/", "a/b", "a/cpu/cpu", "rank:x/cpu", "rank:"])
def test_invalid_places(text: str) -> None:
    with pytest.raises(UsageError, match="is not a place for a module"):
        parse_place(text)
