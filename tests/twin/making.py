"""Programs that are made from a seed: parts by subject add definitions, and lines of the main program.

A program is text. Its functions call `rpc`, `autograd` and so on, which are Telegrad's on workers and those of
`tests.twin.solo` in the one process. A new kind is a function in one of the files of parts, with `@part`.
"""

import inspect
import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.twin import sight

PRELUDE = '''
torch.set_num_threads(1)
torch.manual_seed(1)
SEEN = {}  # by label, what was seen
LEAVES = {}  # by name


def see(label, value):
    """Note a value, and give it."""
    SEEN.setdefault(label, []).append(describe(value))
    return value


def hooked(label, gradient, factor=1.0):
    """Note the gradient of a hook, and give what the hook gives.

    A hook that is reached without any gradient may see zeros in the place of None, as docs/autograd.md says.
    """
    if gradient is None or not gradient.to_dense().any():
        return None
    see(label, gradient)
    return gradient * factor


def seen():
    return SEEN


def relay(to, function, *args):
    """Call from here what was called from elsewhere."""
    return rpc.rpc_sync(to, function, args)


def draw(seed, *shape):
    """Return what is the same on all workers."""
    return torch.randn(shape or (3, 3), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 0.5


def leaf(seed):
    """Return a leaf of this worker."""
    if seed not in LEAVES:
        LEAVES[seed] = draw(seed).requires_grad_()
    return LEAVES[seed]


def see_gradients(label, number):
    try:
        found = autograd.get_gradients(number)
    except RuntimeError:  # this worker took no part
        found = {}
    see(label, [(name, found.get(each), each.grad) for name, each in sorted(LEAVES.items())])


def everywhere(function, *args):
    for name in WORKERS:
        rpc.rpc_sync(name, function, args)


def start_generator():
    torch.manual_seed(2)


def run():
    # Scripts without a guard do not run where workers are started without them. There globals are sent as they are when
    # they are first read, and stay.
    everywhere(start_generator)
    try:
        everywhere(read_globals)
        main()
    except Exception as error:
        see("error", error)
'''

IMPORTS = """
import torch
from torch import nn
import telegrad.rpc as rpc
from telegrad import autograd, checkpoint
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer, clip_grad_norm_
from telegrad.weights import Publisher, Subscriber
"""


class Program(NamedTuple):
    seed: int
    names: list[str]
    definitions: list[str]
    lines: list[str]  # the lines of `main`, with their indentation
    kinds: list[str]  # the names of its parts

    def text(self) -> str:
        main = "\n".join(["def main():", "    pass", *("    " + line for line in self.lines)])
        names = re.findall(
            r"^([A-Z]+\d*) = (?:\{\}|\[\]|\d+)(?: |$)", "\n".join([PRELUDE, *self.definitions]), re.MULTILINE
        )
        reading = f"def read_globals():\n    return {', '.join(f'str({name})' for name in names)}"
        return "\n\n".join([f"WORKERS = {self.names!r}", PRELUDE.strip(), *self.definitions, reading, main]) + "\n"

    def script(self) -> str:
        """Return a program that a person can run; it prints what each worker has seen."""
        describing = inspect.getsource(sight.describe)
        return (
            f"# made from seed {self.seed}: {', '.join(self.kinds)}\n"
            f"from typing import Any\n{IMPORTS}\n\n{describing}\n\n{self.text()}\n\n{START}"
        )


START = """
def serve(rank, port):
    options = rpc.TelegradOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(WORKERS[rank], rank=rank, world_size=len(WORKERS), rpc_backend_options=options)
    if rank == 0:
        run()
        for name in WORKERS:
            for label, values in rpc.rpc_sync(name, seen).items():
                print(name, label, *values, sep="\\n    ")
    rpc.shutdown()


if __name__ == "__main__":
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(serve, (port,), nprocs=len(WORKERS))
"""


class Maker:
    """A program that is being made.

    Parts may take any of `tensors`: expressions for 3 x 3 tensors of float64 that the driver has at that line. Tensors
    that they add have values of about the size of one, so that long chains do not overflow.
    """

    def __init__(self, seed: int, names: Sequence[str]) -> None:
        self.draw = random.Random(seed)
        self.names = list(names) or [f"worker{number}" for number in range(self.draw.choice([2, 3, 3, 4]))]
        self.definitions: list[str] = []
        self.lines: list[str] = []
        self.kinds: list[str] = []
        self.tensors: list[str] = []
        self.context = ""  # the name of the variable with its id, inside of a context
        self.ending: list[str] = []  # lines that follow the backward pass of the context
        self._count = 0

    def fresh(self, prefix: str = "x") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def number(self) -> int:
        return self.draw.randrange(1, 1000)

    def choose(self, *among: str) -> str:
        return self.draw.choice(among)

    def worker(self) -> str:
        """Return the text of any worker's name."""
        return repr(self.draw.choice(self.names))

    def other(self) -> str:
        """Return the text of the name of any worker but the driver."""
        return repr(self.draw.choice(self.names[1:]))

    def tensor(self) -> str:
        return self.draw.choice(self.tensors[-5:])

    def define(self, text: str) -> None:
        self.definitions.append(text)

    def function(self, text: str, prefix: str = "f") -> str:
        """Define a function of these parameters and this body; return its name."""
        name = self.fresh(prefix)
        self.define(f"def {name}{text}")
        return name

    def line(self, text: str) -> None:
        self.lines += [("    " if self.context else "") + line for line in text.splitlines()]

    def see(self, expression: str, label: str = "") -> None:
        self.line(f"see({label or self.fresh('v')!r}, {expression})")

    def see_all(self, expressions: Sequence[str]) -> None:
        for expression in expressions:
            self.see(expression)

    def see_error(self, label: str, call: str) -> None:
        self.line(f"try:\n    {call}\nexcept Exception as error:\n    see({label!r}, error)")

    def gain(self, expression: str) -> str:
        """Name a tensor that later parts may use, and see it."""
        name = self.fresh()
        self.line(f"{name} = {expression}")
        self.see(name, name)
        self.tensors.append(name)
        return name

    def call(self, function: str, *args: str, to: str = "") -> str:
        """Return an expression that calls a function on this or another worker, in any of the ways to call."""
        to = to or self.worker()
        given = "".join(f"{arg}, " for arg in args)
        ways = [
            f"rpc.rpc_sync({to}, {function}, ({given}))",
            f"rpc.rpc_async({to}, {function}, ({given})).wait()",
            f"rpc.remote({to}, {function}, ({given})).to_here()",
            f"rpc.rpc_sync({self.worker()}, relay, ({to}, {function}, {given}))",
            f"rpc.rpc_sync({self.worker()}, relay, ({self.worker()}, relay, {to}, {function}, {given}))",
        ]
        return self.draw.choice(ways)


Part = Callable[[Maker], None]
ANYWHERE: list[Part] = []  # parts for lines inside and outside of contexts
INSIDE: list[Part] = []  # parts for contexts
OUTSIDE: list[Part] = []  # parts that open their own contexts, or need none
COMMON: set[str] = set()  # names of parts that torch.distributed.rpc has, too
RARE: set[str] = set()  # names of parts that take seconds


def part(where: list[Part], common: bool = False, rarely: bool = False) -> Callable[[Part], Part]:
    def enter(function: Part) -> Part:
        where.append(function)
        if rarely:
            RARE.add(function.__name__)
        if common:
            COMMON.add(function.__name__)
        return function

    return enter


def make(seed: int, names: Sequence[str] = (), rounds: int = 0, common: bool = False) -> Program:
    """Return the program of a seed. With `common`, it uses only parts that torch.distributed.rpc has, too."""
    from tests.twin import parts  # the import registers all parts

    assert parts
    maker = Maker(seed, names)
    for _ in range(rounds or maker.draw.choice([1, 1, 2, 3])):
        _round(maker, common)
    return Program(seed, maker.names, maker.definitions, maker.lines, maker.kinds)


def _round(maker: Maker, common: bool) -> None:
    maker.tensors = [maker.gain(f"draw({maker.number()})")]
    inside = maker.draw.random() < 0.65
    if inside:
        context = maker.fresh("c")
        maker.line(f"with autograd.context() as {context}:")
        maker.context = context
        maker.gain(f"leaf({maker.number()}) * 1.0")
    known = [*ANYWHERE, *(INSIDE if inside else OUTSIDE)]
    known = [each for each in known if each.__name__ in COMMON or not common]
    for _ in range(maker.draw.choice([1, 2, 3, 4, 6])):
        (chosen,) = maker.draw.choices(known, [0.2 if each.__name__ in RARE else 1.0 for each in known])
        maker.kinds.append(chosen.__name__)
        chosen(maker)
    if inside:
        _end(maker)


def _end(maker: Maker) -> None:
    """Run the backward pass of a context, and look at the gradients everywhere."""
    loss = " + ".join(f"{name}.sum()" for name in dict.fromkeys(maker.tensors[-3:]))
    maker.line(f"loss = {loss} + leaf(0).sum() * 0.1")
    maker.see("loss")
    twice = maker.draw.random() < 0.2
    maker.line(f"autograd.backward({maker.context}, [loss], retain_graph={twice})")
    if twice:
        maker.line(f"autograd.backward({maker.context}, [loss])")
    maker.line(f"everywhere(see_gradients, 'gradients of {maker.context}', {maker.context})")
    for line in maker.ending:
        maker.line(line.format(context=maker.context))
    maker.ending, maker.context = [], ""
