"""The workers of a program in the single process, and copying of values between them."""

import asyncio
import contextlib
import copy
import inspect
import io
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.twin.sight import describe

PROGRAM = "twin_program"  # the name of the module, in each of the namespaces


class World:
    """The workers of a program, and the number of the current worker."""

    def __init__(
        self, names: list[str], text: str, names_of: "Callable[[World], dict[str, Any]]", sends_modes: bool
    ) -> None:
        self.names = names
        self.sends_modes = sends_modes
        self.here = 0
        self.context: Any = None
        self.contexts: dict[int, Any] = {}
        self.published: dict[tuple[str, str], Any] = {}
        self.saved: dict[str, Any] = {}
        self._kinds: dict[Any, Any] = {}
        self.randomness = [random_state() for _ in names]
        self.spaces: list[dict[str, Any]] = []
        code = compile(text, PROGRAM, "exec")
        for number in range(len(names)):
            sys.modules[PROGRAM] = module = types.ModuleType(PROGRAM)  # `class` statements need it
            space = module.__dict__
            space.update(describe=describe, **names_of(self))
            self.spaces.append(space)
            with self.at(number):
                exec(code, space)

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Enter the modes in which a called function runs: those of its caller, or the default ones."""
        if self.sends_modes:
            yield
            return
        with torch.inference_mode(False), torch.enable_grad():
            yield

    @contextlib.contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Make another worker the current one."""
        before = self.here
        if number == before:
            yield
            return
        self.randomness[before] = random_state()
        self.here = number
        restore_random_state(self.randomness[number])
        try:
            yield
        finally:
            self.randomness[number] = random_state()
            self.here = before
            restore_random_state(self.randomness[before])

    def kind(self, of: Any) -> Any:
        """Return a subclass that has this world as an attribute."""
        if of not in self._kinds:
            self._kinds[of] = type(of.__name__, (of,), {"world": self})
        return self._kinds[of]

    def number_of(self, worker: Any) -> int:
        name = getattr(worker, "name", worker)
        return name if isinstance(name, int) else self.names.index(name)

    def carry(self, value: Any, target: int) -> Any:
        """Return a copy of a value of the current worker, for another worker."""
        carrier = Carrier(self, self.here)
        carrier.dump(value)
        return Arrival(self, target, carrier).load()

    def call(
        self, to: Any, function: Any, args: Iterable[Any], kwargs: dict[str, Any] | None, stay: bool = False
    ) -> Any:
        """Run a function on a worker. With `stay`, its result is a box on that worker, and not copied."""
        target, source = self.number_of(to), self.here
        function, args, kwargs = self.carry((function, tuple(args), kwargs or {}), target)
        with self.at(target), self.modes():
            result = function(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            if getattr(function, "is_async_execution", False):
                result = result.wait()
            return result if stay else self.carry(result, source)


def random_state() -> Any:
    return torch.get_rng_state(), random.getstate()


def restore_random_state(state: Any) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])


# Copies


class Stays:
    """An object that is not copied: it refers to a value of one worker."""

    world: World


class Carrier(pickle.Pickler):
    """Takes a value apart; tensors, parts of the program and objects that stay are kept beside the pickle."""

    def __init__(self, world: World, source: int) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, 5)
        self.space = world.spaces[source]
        self.beside: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.world = world

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, (Tensor, Stays)):
            if id(obj) not in self.numbers:
                self.numbers[id(obj)] = len(self.beside)
                self.beside.append(obj)
            return "beside", self.numbers[id(obj)]
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == PROGRAM:
            if "<" not in obj.__qualname__:
                return "named", obj.__qualname__
            assert isinstance(obj, types.FunctionType), "classes inside of functions do not travel here"
            cells = tuple(cell.cell_contents for cell in obj.__closure__ or ())
            self.beside.append((obj.__code__, obj.__name__, obj.__defaults__))
            return "made", len(self.beside) - 1, cells
        return None


class Arrival(pickle.Unpickler):
    """Puts a value together in another namespace."""

    def __init__(self, world: World, target: int, carrier: Carrier) -> None:
        super().__init__(io.BytesIO(carrier.file.getvalue()))
        self.world = world
        self.space = world.spaces[target]
        self.beside = carrier.beside
        self.storages: dict[int, Any] = {}
        self.arrived: dict[int, Any] = {}

    def persistent_load(self, key: Any) -> Any:
        kind, what, *rest = key
        if kind == "named":
            found = self.space[what.partition(".")[0]]
            for part in what.split(".")[1:]:
                found = getattr(found, part)
            return found
        if kind == "made":
            code, name, defaults = self.beside[what]
            closure = tuple(map(types.CellType, rest[0]))
            return types.FunctionType(code, self.space, name, defaults, closure)
        obj = self.beside[what]
        if not isinstance(obj, Tensor):
            return obj
        if what not in self.arrived:
            self.arrived[what] = self._tensor(obj)
        return self.arrived[what]

    def _tensor(self, given: Tensor) -> Tensor:
        kind = type(given)
        if kind.__module__ == PROGRAM:
            kind = self.space[kind.__name__]
        plain = given if kind is Tensor else given.as_subclass(Tensor)
        if given.requires_grad and torch.is_grad_enabled() and self.world.context is not None:
            made = plain.clone()
            if kind is not Tensor:
                made = made.as_subclass(kind)
        else:
            with torch.inference_mode(False), torch.no_grad():
                made = self._copy(plain.detach())
            if kind is not Tensor:
                made = Tensor._make_subclass(kind, made, given.requires_grad)
            made.requires_grad_(given.requires_grad)
        made.__dict__.update(copy.deepcopy(vars(given)))
        return made

    def _copy(self, plain: Tensor) -> Tensor:
        """Copy a tensor; copies of tensors that share memory share memory."""
        if plain.layout is not torch.strided or plain.is_conj() or plain.is_neg():
            return plain.clone()
        storage = plain.untyped_storage()
        if storage.data_ptr() not in self.storages:
            self.storages[storage.data_ptr()] = storage.clone()
        made = torch.empty(0, dtype=plain.dtype)
        return made.set_(self.storages[storage.data_ptr()], plain.storage_offset(), plain.shape, plain.stride())
