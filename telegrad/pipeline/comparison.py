"""Compare a model with its stages, for an example, in this process.

A recording contains only operators. Other effects of a forward pass are Python state, globals, the training flags of a
part, and hooks of tensors. These effects, and memory that stages would have to share, show in outputs, gradients,
buffers or random numbers. Or they are detected while the model runs: activation checkpointing, and functions with their
own backward. So the model and its stages run with the same seed, in both modes, with several batch sizes. Both are
copies: the model does not change. Between stages, tensors are copied as between workers.

A model that mixes samples gives other outputs if a batch is cut into micro-batches, so the model runs with both, too.
"""

import contextlib
import copy
import dis
import inspect
import io
import pickle
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from telegrad.errors import UsageError
from telegrad.ext.host import forks, renewed
from telegrad.pipeline.exported import Inputs, resized
from telegrad.pipeline.microbatches import are_parts, is_close, parts_of, sizes_of

_BY_HAND = "build the stages by hand: Pipeline([RemoteModule('worker1', First), ...])"
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_MODES = {True: "training", False: "evaluation"}
_INSTEAD = f"Keep such state in a buffer that one stage uses, cut elsewhere, or {_BY_HAND}"


def copied(model: nn.Module) -> nn.Module:
    """Copy a model. Results of operations, which torch does not copy, lose their history."""
    made = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in made if not value.is_leaf})


def verify_stages(
    model: nn.Module, stages: Sequence[nn.Module], inputs: Inputs | None, example: Any, chunks: int
) -> None:
    """Compare a model with its stages, and a batch with its micro-batches; raise UsageError if they differ, or the
    model has effects that stages cannot have."""
    # Another size than the example's finds sizes that were recorded as constants. A single sample is a special case in
    # many models, which need not accept it: then a recorded model is not refused, but later batches of one sample are.
    comparison = _Comparison(model, stages, inputs, example)
    size = comparison.size
    for mode, samples, with_backward in [
        *((True, size, True), (True, size + 1, True), (False, size, True), (False, size + 1, False)),
        *((False, 1, False), (True, 1, False)),
    ]:
        with torch.inference_mode(False), torch.set_grad_enabled(with_backward):
            differing = comparison.run(mode, samples, with_backward)
        if differing and samples == 1 and inputs is not None:
            inputs.refuse_one(mode)
        elif differing:
            raise UsageError(
                f"the stages of {type(model).__name__} differ from the model in {_MODES[mode]}, with {samples} "
                f"samples: {'; '.join(differing[:4])}. Stages share no tensors, and a recorded forward pass "
                "contains only operators: no Python state or globals that change, no tensor hooks. "
                f"{_INSTEAD}"
            )
    for mode in (True, False):
        with torch.inference_mode(False), torch.enable_grad():
            mixing = comparison.find_mixing(mode, chunks)
        if mixing:
            raise UsageError(
                f"the outputs of {type(model).__name__} in {_MODES[mode]} change if a batch is cut into micro-batches: "
                f"{', '.join(mixing[:4])}. It mixes or counts samples, as in h - h.mean(0) or an auxiliary loss of "
                "the batch, and each stage sees one micro-batch at a time. Return values for each sample, and compute "
                "in a context what needs the whole batch from the outputs of pipeline(inputs); or use chunks=1; or "
                "check=False, if it may be computed for each micro-batch"
            )


class _Comparison:
    def __init__(self, model: nn.Module, stages: Sequence[nn.Module], inputs: Inputs | None, example: Any) -> None:
        self._whole, self._parts = copied(model), [copy.deepcopy(stage) for stage in stages]
        self._inputs = inputs
        leaves, self._form = tree_flatten(example)
        self._leaves = leaves if inputs is None else inputs.leaves
        self._returned = {} if inputs is None else _watch_hooks(self._whole)
        self.size = max((len(leaf) for leaf in self._leaves if isinstance(leaf, Tensor) and leaf.dim()), default=0)
        first: dict[nn.Parameter, str] = {}
        named = self._whole.named_parameters(remove_duplicate=False)
        # for tied parameters, the first name
        self._names = {name: first.setdefault(parameter, name) for name, parameter in named}

    def run(self, mode: bool, samples: int, with_backward: bool) -> list[str]:
        """Run both; return the names of the results that differ."""
        for each in (self._whole, *self._parts):
            each.train(mode)
        given = resized(self._leaves, samples)
        try:
            wanted, values = self._results(self._run_whole, [self._whole], given, with_backward)
        except Exception as error:
            if samples == self.size or isinstance(error, UsageError):
                raise
            # The model does not accept this size. For sizes other than 1, the recorded guards reject it, too.
            return [f"the model raises {type(error).__name__}"] if samples == 1 and self._inputs is not None else []
        for name, does in self._returned.items():
            if not does:
                raise UsageError(
                    f"the hook {name} returns nothing, so it only has side effects, which no stage would repeat: "
                    "remove it before Pipeline.split, or have it return the changed value"
                )
        try:
            if self._inputs is not None:
                self._inputs.check((None, given), mode)
            found, held = self._results(self._run_parts, self._parts, given, with_backward)
        except Exception as error:
            return [f"the stages raise {type(error).__name__}: {error}"]
        pairs = [(name, wanted.get(name), found.get(name)) for name in wanted.keys() | found.keys()]
        whole = dict(values)
        pairs += [(f"the value of {name!r}", whole[name], value) for name, value in held if name in whole]
        return sorted({name for name, one, other in pairs if not _alike(one, other)})

    def _run_whole(self, given: Sequence[Any]) -> Any:
        if self._inputs is None:
            return self._whole(tree_unflatten(list(given), self._form))
        before = _python_state(self._whole)
        with _no_saving():
            found = self._whole(**self._inputs.named(given))
        _check_functions(found)
        _check_state(self._whole, before)
        return found

    def _run_parts(self, given: Sequence[Any]) -> Any:
        value = tree_unflatten(list(given), self._form) if self._inputs is None else (None, list(given))
        for part in self._parts:
            value = part(_sent(value))
        return value

    def find_mixing(self, mode: bool, chunks: int) -> list[str]:
        """Return the outputs of the model that are not those of its micro-batches, for the example."""
        chunks = min(chunks, self.size)
        if chunks < 2:
            return []
        self._whole.train(mode)
        try:  # each sample twice, since a micro-batch of one sample may be a special case
            batch = [leaf.repeat_interleave(2, 0) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
            parts, sizes = parts_of(batch, chunks), sizes_of(batch, batch, chunks)
            with _seeded([self._whole]), _WithoutBatchNorm(), _WithoutChance():  # type: ignore[no-untyped-call]
                wanted, again, *found = map(self._outputs, (batch, batch, *parts))
        except Exception:  # the model does not accept this size: a pipeline raises the error for such a batch
            return []
        own = {each.dtype for each in (*wanted, *self._whole.parameters()) if each.is_floating_point()}
        allowed = max([1e-3, *(2 * torch.finfo(dtype).eps for dtype in own)])
        # The model has run on the batch twice. If the results differ, it is random in a way that is not replaced, and
        # the comparison would take that for mixing.
        if len({*map(len, (wanted, again, *found))}) > 1 or not all(map(is_close, wanted, again, repeat(allowed))):
            return []  # lists of samples, or random in a way that is not replaced
        shares = [size / sum(sizes) for size in sizes]
        return [
            f"output {number}"
            for number, (whole, *several) in enumerate(zip(wanted, *found, strict=True))
            if not are_parts(whole, several, shares, allowed)
        ]

    def _outputs(self, given: Sequence[Any]) -> list[Tensor]:
        """Run the model with copies of its buffers; return the outputs whose values can be compared."""
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in given]
        buffers = {name: buffer.clone() for name, buffer in self._whole.named_buffers()}
        if self._inputs is None:
            found = functional_call(self._whole, buffers, (tree_unflatten(own, self._form),))
        else:
            found = functional_call(self._whole, buffers, (), self._inputs.named(own))
        return [each.detach() for each in tree_leaves(found) if isinstance(each, Tensor) and each.is_floating_point()]

    def _results(
        self,
        call: Callable[[Sequence[Any]], Any],
        modules: Sequence[nn.Module],
        given: Sequence[Any],
        with_backward: bool,
    ) -> tuple[dict[str, Any], list[tuple[str, Tensor]]]:
        """Run a model, or its stages; return the results by their names, and the values of parameters and buffers."""
        with _seeded(modules):
            own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in given]
            led = [leaf for leaf in own if with_backward and isinstance(leaf, Tensor) and leaf.is_floating_point()]
            for leaf in led:
                leaf.requires_grad_()
            outputs = tree_leaves(call([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in own]))
            results: dict[str, Any] = {f"output {number}": value for number, value in enumerate(outputs)}
            if with_backward:
                trained = [pair for module in modules for pair in module.named_parameters() if pair[1].requires_grad]
                names = [
                    *(f"the gradient of input {number}" for number in range(len(led))),
                    *(f"the gradient of {self._names.get(name, name)!r}" for name, _ in trained),
                ]
                gradients = _gradients(outputs, [*led, *(each for _, each in trained)])
                for name, gradient in zip(names, gradients, strict=True):
                    if gradient is not None:  # stages that share a parameter each have a part of its gradient
                        results[name] = results[name] + gradient if name in results else gradient
            results["the random generator of torch"] = torch.get_rng_state()
            results["the random generator of Python"] = random.getstate()
            if numpy := sys.modules.get("numpy"):
                results["the random generator of NumPy"] = repr(numpy.random.get_state())
        values = [
            (name, value.detach().clone())
            for module in modules
            for held in (module.named_parameters, module.named_buffers)
            for name, value in held(remove_duplicate=False)
        ]
        return results, values


def _gradients(outputs: Sequence[Any], wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
    # The gradients that enter have different values, unlike ones, so that swapped or permuted outputs show.
    ends = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
    entering = [
        torch.arange(each.numel(), device=each.device).cos().reshape(each.shape).to(each.dtype) for each in ends
    ]
    if not ends or not wanted:
        return [None] * len(wanted)
    return torch.autograd.grad(ends, wanted, entering, allow_unused=True)


@contextlib.contextmanager
def _seeded(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Seed the random generators inside; restore them afterwards."""
    held = [each for module in modules for each in (*module.parameters(), *module.buffers())]
    numpy = sys.modules.get("numpy")
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for device in {each.device for each in held if each.device.type not in ("cpu", "meta")}:
            stack.enter_context(torch.random.fork_rng(devices=[device.index or 0], device_type=device.type))
        stack.callback(random.setstate, random.getstate())
        torch.manual_seed(0)
        random.seed(0)
        if numpy:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
            numpy.random.seed(0)
        yield


def _alike(one: Any, other: Any) -> bool:
    try:
        if not isinstance(one, Tensor):
            return type(one) is type(other) and bool(one == other)
        if one.dtype in (torch.bfloat16, torch.float16) and isinstance(other, Tensor) and other.dtype == one.dtype:
            return is_close(one, other, 4 * torch.finfo(one.dtype).eps)  # operators of a recorded pass round elsewhere
        torch.testing.assert_close(other, one, equal_nan=True)
    except (AssertionError, TypeError, ValueError):
        return False
    return True


class _WithoutBatchNorm(TorchFunctionMode):
    """Leave out batch normalization, which is known to see one micro-batch at a time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in (functional.batch_norm, torch.batch_norm):
            return (args[0] if args else named["input"]).clone()
        return func(*args, **named)


class _WithoutChance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replace random numbers by constants, as a batch and its micro-batches would draw different ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        found = func(*args, **(kwargs or {}))
        # Attention and recurrent layers have this tag, too, but compute from their inputs.
        if torch.Tag.nondeterministic_seeded in func.tags and not re.search("attention|rnn", func.name()):
            for each in tree_leaves(found):
                each.fill_(0.5 if each.is_floating_point() else each.dtype == torch.bool)
        return found


def _sent(value: Any) -> Any:
    """Copy a value as a transfer does: its tensors share no memory, and a tensor that occurs twice stays one tensor."""
    made: dict[Tensor, Tensor] = {}
    return tree_map_only(Tensor, lambda tensor: made.setdefault(tensor, tensor.clone()), value)


# Other effects of a forward pass

_one_by_one = renewed(threading.RLock())  # guards saved_tensors_hooks.__enter__


class _ReportWriter(pickle.Pickler):
    """A pickler that writes tensors, modules, classes and functions by their identity, and other values completely."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.identified: list[Any] = []  # kept alive: no other object may get their ids

    def persistent_id(self, value: Any) -> int | bytes | None:
        if isinstance(value, torch.Generator):  # its pickle has a new tensor each time
            return value.get_state().numpy().tobytes()
        if not isinstance(value, (Tensor, nn.Module, type, ModuleType, FunctionType)):
            return None
        self.identified.append(value)
        return id(value)


def _fingerprint(value: Any) -> bytes | None:
    """Return bytes that change if the value changes. Return None for a value whose pickle is different each time."""
    # A pickle compares nested values of any class, in their present state, which `==` and copies cannot do in general.
    # It is written twice, because some are different each time, and would look like a change.
    files = io.BytesIO(), io.BytesIO()
    writers = [_ReportWriter(file) for file in files]
    try:
        for writer in writers:
            writer.dump(value)
    except Exception:
        return None
    first, second = (file.getvalue() for file in files)
    return first if first == second else None


def _python_state(model: nn.Module) -> dict[str, bytes | None]:
    """Return the attributes of all modules and of their classes, and the globals that their methods use."""
    attributes = {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE
    }
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    kinds = {kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins")}
    of_classes = {f"{kind.__name__}.{name}": value for kind in kinds for name, value in vars(kind).items()}
    first = [each for each in (*attributes.values(), *of_classes.values()) if isinstance(each, FunctionType)]
    found = attributes | of_classes | _globals_of(first)
    return {name: _fingerprint(value) for name, value in found.items()}


def _globals_of(functions: list[FunctionType]) -> dict[str, Any]:
    """Return the globals and outer variables that functions use, including called functions in the same packages."""
    packages = {each.__module__.partition(".")[0] for each in functions}
    found: dict[str, Any] = {}
    while functions:
        function = functions.pop()
        used = {name: function.__globals__.get(name) for name in _global_names(function.__code__)}
        with contextlib.suppress(ValueError):  # a variable without a value
            used |= inspect.getclosurevars(function).nonlocals
        for name, value in used.items():
            path = f"{function.__module__}.{name}"
            if path not in found and isinstance(value, FunctionType) and value.__module__.partition(".")[0] in packages:
                functions.append(value)
            found[path] = value
    return found


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the globals that code and its inner functions use. `co_names` would include attributes, too."""
    for instruction in dis.get_instructions(code):
        if instruction.opname.endswith("_GLOBAL"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _check_state(model: nn.Module, before: Mapping[str, bytes | None]) -> None:
    after = _python_state(model)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise UsageError(
                f"the forward pass of {type(model).__name__} changes {name!r}, which is Python state: a stage would "
                f"not change it. {_INSTEAD}"
            )


@contextlib.contextmanager
def _no_saving() -> Iterator[None]:
    """Raise UsageError, on this thread, for hooks that change how tensors are saved for backward."""
    # A recording would drop the hooks in silence. They are used by activation checkpointing without reentrance. Other
    # threads, which may train at this moment, get the original method.
    here = forks.thread()

    def enter(hooks: saved_tensors_hooks) -> None:
        if forks.thread() == here:
            raise UsageError(
                "the forward pass uses activation checkpointing, or other saved_tensors_hooks, which cannot be "
                f"recorded: cut the model without it, with more micro-batches (`chunks`), or {_BY_HAND}"
            )
        own(hooks)

    with _one_by_one:
        own = saved_tensors_hooks.__enter__
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
        try:
            yield
        finally:
            saved_tensors_hooks.__enter__ = own  # type: ignore[method-assign]


def _check_functions(outputs: Any) -> None:
    # The graph of the outputs shows them: the node of such a function is a Python object. A recording has the operators
    # of its forward only, so autograd would compute another gradient than the function's backward.
    seen: set[Any] = {None}
    stack: list[Any] = [each.grad_fn for each in tree_leaves(outputs) if isinstance(each, Tensor)]
    while stack:
        if (node := stack.pop()) in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise UsageError(
                f"the forward pass uses a torch.autograd.Function ({type(node).__name__.removesuffix('Backward')}). "
                f"Only the operators of its forward would be recorded: write it with operators, or {_BY_HAND}"
            )


def _watch_hooks(model: nn.Module) -> dict[str, bool]:
    """Record which forward hooks of a model's modules return a value."""
    returned: dict[str, bool] = {}

    def watched(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = hook(*args, **kwargs)
            returned[name] |= found is not None
            return found

        return call

    for path, module in model.named_modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in hooks.items():
                if not (getattr(hook, "__module__", None) or "").startswith("torch."):
                    returned[name := f"{getattr(hook, '__qualname__', hook)} of {path!r}"] = False
                    hooks[key] = watched(hook, name)
    return returned
