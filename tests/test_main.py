"""A program does the same with each way to start its workers: with globals, classes, singletons, and functions."""

import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from telegrad.__main__ import _run_module
from telegrad._core.pickling.global_names import SentGlobals
from telegrad._core.pickling.main_modules import Item, MainNamespace
from telegrad._core.pickling.main_program import Program
from tests.cluster import PATIENCE, free_port

PATIENT = 4 * PATIENCE
SHARED = """
import contextlib, dataclasses, enum, functools, os, sys, threading, typing
import torch
from torch import nn
import telegrad.rpc as rpc

counter = 0
cache = {}
Key = typing.NewType("Key", str)
lock = LOCK
model = nn.Linear(2, 1)
with torch.no_grad():
    model.weight.fill_(1.0)
    model.bias.fill_(0.0)
param_server = None

def bump():
    global counter
    with lock:
        counter += 1
    return counter

def put(key, value):
    cache[Key(key)] = value
    return sorted(cache)

def train():
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model(torch.ones(1, 2)).item()

class Point:
    made = 0
    def __init__(self, x):
        type(self).made += 1
        self.x = x

@dataclasses.dataclass
class Record:
    x: int

class Color(enum.Enum):
    RED = 1

class Base:
    def name(self):
        return "base"

class Heir(Base):
    def name(self):
        return "heir of " + super().name()

def keep(x):
    cache.update(point=Point(x), record=Record(x), color=Color.RED, heir=Heir())
    return Point.made

def same_kinds():
    kinds = isinstance(cache["point"], Point), cache["color"] is Color.RED, isinstance(cache["heir"], Base)
    return *kinds, cache["record"] == Record(3), cache["heir"].name(), Point.made

def are_own(point, color):
    return type(point) is Point, color is Color.RED

class Singleton:
    instance = None
    def __new__(cls):
        if cls.instance is None:
            cls.instance = super().__new__(cls)
            cls.instance.uses = 0
        return cls.instance

def single():
    one = Singleton()
    one.uses += 1
    return one.uses

def counted(function):
    calls = []
    @functools.wraps(function)
    def wrapper(*args):
        calls.append(args)
        return len(calls), function(*args)
    return wrapper

@counted
def twice(x):
    return 2 * x

def marked():
    marked.calls = getattr(marked, "calls", 0) + 1
    return marked.calls

class ParameterServer(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = 0
    def push(self, x):
        self.value += x
        return self.value

def get_parameter_server():
    global param_server
    with lock:
        if param_server is None:
            param_server = ParameterServer()
    return param_server

@functools.lru_cache
def cached(x):
    return x

def cache_hits():
    return cached.cache_info().hits

gone = 1

def delete():
    global gone
    there = "gone" in globals()
    if there:
        del gone
    return there

arguments = sys.argv[1:]

def scale(by, x):
    return by * x + counter

def give():
    return Point(7), Color.RED

block = torch.zeros(1 << 20)

class Failure(LookupError):
    def size(self):
        return block.numel()

def fail():
    with lock:
        raise Failure("it is not there")

def catch(name):
    try:
        rpc.rpc_sync(name, fail)
    except Failure as error:
        return error.args[0].upper(), error.size()

def drive(to):
    def call(function, *args):
        return rpc.rpc_sync(to, function, args)

    print("counter", [call(bump) for _ in range(3)])
    print("lambda", [call(lambda: bump()) for _ in range(2)])
    print("dict", [call(put, key, key) for key in "ab"])
    print("model", [call(train) for _ in range(3)])
    print("classes", call(keep, 3), call(same_kinds), call(are_own, Point(1), Color.RED))
    print("singleton", [call(single) for _ in range(3)])
    print("decorated", [call(twice, 4) for _ in range(2)], [call(marked) for _ in range(2)])
    print("partial", call(functools.partial(scale, 10), 2))
    servers = [rpc.remote(to, get_parameter_server) for _ in range(2)]
    print("server", [server.rpc_sync().push(1) for server in servers * 2])
    print("cache", [call(cached, 2) for _ in range(3)], call(cache_hits))
    print("deleted", [call(delete) for _ in range(2)])
    print("arguments", call(lambda: arguments))
    point, color = call(give)
    print("back", type(point) is Point, color is Color.RED)
    print("caught", call(catch, rpc.get_worker_info().name), catch(to))
    print("driver", counter, sorted(cache), Point.made, param_server)

def join(name, rank):
    options = rpc.TelegradOptions(init_method=f"tcp://127.0.0.1:{PORT}")
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        drive("w")
    rpc.shutdown()

def child(number):
    join(*(("driver", 0), ("w", 1))[number])
"""
EXPECTED = """\
counter [1, 2, 3]
lambda [4, 5]
dict [['a'], ['a', 'b']]
model [5.0, 8.0, 11.0]
classes 1 (True, True, True, True, 'heir of base', 1) (True, True)
singleton [1, 2, 3]
decorated [(1, 8), (2, 8)] [1, 2]
partial 25
server [1, 2, 3, 4]
cache [2, 2, 2] 2
deleted [True, False]
arguments ['one', 'two']
back True True
caught ('IT IS NOT THERE', 1048576) ('IT IS NOT THERE', 1048576)
driver 0 [] 1 None
"""
LOCAL = """
    import telegrad
    with telegrad.local(["w"]):
        drive("w")
"""
WORKER = """
    import subprocess
    place = ["--rank", "1", "--world-size", "2", "--master", f"127.0.0.1:{PORT}"]
    worker = subprocess.Popen([sys.executable, "-m", "telegrad", "worker", "w", *place])
    join("driver", 0)
    worker.wait()
"""
RUN = """
    rpc.init_rpc()
    rpc.wait_for_workers(["serving0"])
    drive("serving0")
    rpc.shutdown()
"""
PROCESSES = """
    import multiprocessing
    processes = [multiprocessing.get_context("{}").Process(target=child, args=(n,)) for n in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
"""
ALL = """
    join("driver" if os.environ["RANK"] == "0" else "w", int(os.environ["RANK"]))
"""
GUARD, NO_GUARD = 'if __name__ == "__main__":', "if True:"
LOCK, NO_LOCK = "threading.Lock()", "contextlib.nullcontext()"

# By name: the guard of the program, its end, and the command that starts it.
WAYS: dict[str, tuple[str, str, list[str]]] = {
    "local": (GUARD, LOCAL, ["{file}"]),
    "worker": (NO_GUARD, WORKER, ["{file}"]),
    "worker, guarded": (GUARD, WORKER, ["{file}"]),
    "local, not guarded": (NO_GUARD, LOCAL, ["{file}"]),
    "local, standard input": (NO_GUARD, LOCAL, ["-"]),
    "local, module": (GUARD, LOCAL, ["-m", "package.program"]),
    "run": (GUARD, RUN, ["-m", "telegrad", "run", "--role", "serving", "--role", "driver", "--", "python", "{file}"]),
    "spawn": (GUARD, PROCESSES.format("spawn"), ["{file}"]),
    "fork": (GUARD, PROCESSES.format("fork"), ["{file}"]),
    "forkserver": (GUARD, PROCESSES.format("forkserver"), ["{file}"]),
    "torchrun": (GUARD, ALL, [*["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"], "{file}"]),
}


def start(folder: pathlib.Path, text: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    (folder / "package").mkdir()
    for file in (folder / "program.py", folder / "package" / "program.py"):
        file.write_text(text)
    current = folder
    # The program does not import from the current folder, so its workers must not, either.
    if command[0] in ("{file}", "-P") and "telegrad.local(" in text:
        current = folder / "elsewhere"
        current.mkdir()
        for name in ("telegrad", "torch", "json", "numpy"):
            (current / f"{name}.py").write_text("import os; os._exit(77)\n")
    words = [word.format(file=folder / "program.py") for word in command]
    given = text if words == ["-"] else None
    words += ["one", "two"]
    return subprocess.run(
        [sys.executable, *words],
        input=given,
        capture_output=True,
        text=True,
        timeout=PATIENT,
        cwd=current,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def printed(text: str) -> str:
    """Return the output of the program, without prefixes and lines of launchers."""
    lines = [re.sub(r"^\[\w+\] ", "", line) for line in text.splitlines()]
    first_words = {line.split()[0] for line in EXPECTED.splitlines()}
    return "".join(f"{line}\n" for line in lines if line.split(" ")[0] in first_words and "has ended" not in line)


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENT)
@pytest.mark.parametrize("way", WAYS)
def test_a_program_does_the_same_with_each_way_to_start_workers(way: str, tmp_path: pathlib.Path) -> None:
    guard, end, command = WAYS[way]
    lock = LOCK if guard == GUARD else NO_LOCK  # a lock cannot be sent if workers do not import the program
    text = (SHARED.replace("LOCK", lock) + guard + end).replace("{PORT}", str(free_port()))
    ran = start(tmp_path, text, command)
    assert printed(ran.stdout) == EXPECTED, ran.stdout + ran.stderr


KINDS = {  # globals: how they are made, read and changed in place
    "mapping": ("{'k': 1}", "mapping['k']", "mapping.update(k=2)"),
    "inner": ("{'a': [{'b': 1}]}", "inner['a'][0]['b']", "inner['a'][0].update(b=2)"),
    "numbers": ("[1]", "numbers[0]", "numbers.append(2)"),
    "members": ("{1}", "sorted(members)", "members.add(2)"),
    "queue": ("collections.deque([1])", "list(queue)", "queue.append(2)"),
    "counts": ("collections.defaultdict(int)", "dict(counts)", "counts.update(k=1)"),
    "options": ("argparse.Namespace(rate=1)", "options.rate", "vars(options).update(rate=2)"),
    "holder": (
        "argparse.Namespace(own=argparse.Namespace(rate=1))",
        "holder.own.rate",
        "vars(holder.own).update(rate=2)",
    ),
    "Kind": ("type('Kind', (), {'rate': 1, '__module__': __name__})", "Kind.rate", "setattr(Kind, 'rate', 2)"),
}
ARRAYS = {
    "tensor": ("torch.zeros(3)", "tensor.sum().item()", "tensor.add_(1)"),
    "raw": ("torch.zeros(3)", "raw.sum().item()", "raw.data.fill_(1)"),
    "weights": ("torch.nn.Linear(2, 2)", "weights.bias.sum().item()", "torch.nn.init.ones_(weights.bias.data)"),
    "large": ("torch.zeros(1 << 20)", "large.sum().item()", "large.data.add_(1)"),
    "array": ("numpy.zeros(3)", "array.sum()", "array.__iadd__(1)"),
    "arrays": ("{'a': numpy.zeros(3)}", "arrays['a'].sum()", "arrays['a'].fill(1)"),
    "raw_bytes": ("bytearray(b'ab')", "bytes(raw_bytes)", "raw_bytes.append(1)"),
}
UNCHANGED = {
    "same": ("{'k': [1, 2.5, 'text', None]}", "same['k'][0]", "None"),
    "net": ("torch.nn.Linear(1, 1)", "net", "0"),
}


def reading(kinds: dict[str, tuple[str, str, str]]) -> str:
    text = "import argparse, collections, threading\nimport numpy, torch, telegrad\nfrom telegrad import rpc\n"
    for name, (make, read, change) in kinds.items():
        text += f"{name} = {make}\ndef get_{name}():\n    return {read}\ndef set_{name}():\n    {change}\n"
    return text + "names = " + repr(list(kinds)) + "\n"


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENT)
def test_each_change_in_place_of_a_sent_global_is_logged_once(tmp_path: pathlib.Path) -> None:
    text = (
        reading(KINDS | ARRAYS | UNCHANGED)
        + """
with telegrad.local(["w"]):
    for name in names:
        for _ in range(3):
            rpc.rpc_sync("w", globals()["get_" + name])
            globals()["set_" + name]()
    mapping = {"k": 3}
    print(rpc.rpc_sync("w", get_mapping))
    mapping["k"] = 4
    rpc.rpc_sync("w", get_mapping)

    part = [1]
    whole = [part]
    rpc.rpc_sync("w", lambda: whole)
    del mapping, whole
    for _ in range(2):
        try:
            print(rpc.rpc_sync("w", get_mapping))
        except NameError:
            print("gone")
        print(rpc.rpc_sync("w", lambda: part[0]))
    mapping = {"k": 5}
    print(rpc.rpc_sync("w", get_mapping))

    late, lock = [1], threading.Lock()
    for _ in range(2):
        try:
            rpc.rpc_sync("w", lambda: (late, lock))
        except telegrad.errors.CannotEncode:
            late.append(2)
    lock = None
    print(rpc.rpc_sync("w", lambda: (late, lock)))  # sent for the first time
    late.append(3)
    print(rpc.rpc_sync("w", lambda: late))
"""
    )
    ran = start(tmp_path, text, ["{file}"])
    assert ran.stdout == "3\ngone\n1\ngone\n1\n5\n([1, 2, 2], None)\n[1, 2, 2]\n", ran.stdout + ran.stderr
    told = re.findall("the global '(\\w+)' of the main program was changed in place", ran.stderr)
    assert sorted(told) == sorted([*KINDS, *ARRAYS, "mapping", "late"]), ran.stderr


GUARDED = (
    SHARED.replace("LOCK", LOCK)
    + reading(KINDS | UNCHANGED | {"bound": ("None", "bound", "0"), "own": ("None", "own", "0")})
    + """
import functools, torch.distributed.rpc

rate, limit, limits, cells, hits = 0.1, 3, [3], [1], 0
large = {10**5000: {-(10**5000)}, "list": [10**5000]}

def make_own():
    global own
    own = [1]

def hit():
    global hits
    hits += 1
def step():
    return rate
def late():
    return made_late
def table():
    return cells
def limited():
    return limit, limits

def wrap(function):
    return functools.wraps(function)(lambda: function() + 1)
def again(): return 1
def wrapped(): return 1
def reader(): return again()
class Rebound:
    def value(self): return 1

def served():
    import torch.distributed.rpc
    return torch.distributed.rpc.rpc_sync.__module__.partition(".")[0]

def show(*values):
    print(*values, sep="; ")

def call(function):
    try:
        return rpc.rpc_sync("w", function)
    except telegrad.errors.CannotEncode as error:
        return error

if __name__ == "__main__":
    def fresh():
        return limit

    bound = argparse.Namespace(rate=1)
    for name in names:
        globals()["set_" + name]()
    make_own()
    rate = 0.5
    made_late = 7
    shared = [cells]
    with telegrad.local(["w"]):
        show("hits", call(hit), call(lambda: hits))
        drive("w")
        show("drop-in", served(), call(served))
        call(make_own)  # each process has its own: no warning
        for name in names * 2:
            call(globals()["get_" + name])
        show("differs", call(step), call(step), call(late), call(lambda: made_late + rate))
        show("shares", call(lambda: (shared, cells)))
        show("guarded", call(fresh))
        del limit, limits
        show("deleted", call(limited), call(limited))
        show("top", *map(call, (again, wrapped, reader)))
        def again(): return 2
        wrapped = wrap(wrapped)
        class Rebound:
            def value(self): return 2
        show("bound again", *map(call, (again, wrapped, reader, Rebound, Rebound().value)))
"""
)


@pytest.mark.timeout(2 * PATIENT)
def test_globals_and_functions_that_differ_from_those_that_workers_import(tmp_path: pathlib.Path) -> None:
    """The program also does what it does with each other way to start workers."""
    ran = start(tmp_path, GUARDED, ["-P", "-m", "telegrad", "{file}"])
    assert printed(ran.stdout) == EXPECTED, ran.stdout + ran.stderr
    told = {
        label: rest for label, is_told, rest in (line.partition("; ") for line in ran.stdout.splitlines()) if is_told
    }
    bound_again = re.findall("name '(\\w+)' is bound at the top level", told.pop("bound again", ""))
    assert bound_again == ["again", "wrapped", "again", "Rebound", "Rebound"], ran.stdout + ran.stderr
    assert "the global 'shared' of the main program shares an object with 'cells'" in told.pop("shares")
    assert told == {
        "hits": "None; 1",
        "drop-in": "telegrad; telegrad",
        "differs": "0.1; 0.1; 7; 7.1",
        "guarded": "3",
        "deleted": "(3, [3]); (3, [3])",
        "top": "1; 1; 1",
    }
    changed = re.findall("the global '(\\w+)' of the main program is another at the caller", ran.stderr)
    assert sorted(changed) == sorted([*KINDS, "bound"]), ran.stderr
    differing = re.findall("the global '(\\w+)' of \\S+ is (\\S+) at the caller and (\\S+) at this worker", ran.stderr)
    assert differing == [("rate", "0.5", "0.1"), ("limit", "deleted", "3"), ("limits", "deleted", "[3]")]
    assert len(ran.stderr.splitlines()) == len(changed) + len(differing), ran.stderr


@pytest.mark.parametrize("name", ["missing", "missing.inner", ".relative", "json.missing"])
def test_a_module_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(SystemExit, match=f"no module named {re.escape(name)}"):
        _run_module(name)


def test_a_global_number_that_differs_between_runs_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    scope = MainNamespace(Program("a key", "/somewhere/program.py"), {}, own=False)
    for rate in (0.1, 0.1, 0.5, 0.5):
        scope.fill([Item("rate", 1, rate)])
    assert scope.names == {"rate": 0.1}
    assert caplog.text.count("'rate' of /somewhere/program.py is 0.5 at the caller and 0.1 at this worker") == 1
    scope.fill([Item("rate", 2, 0.7)])  # the sender has assigned it again
    assert scope.names == {"rate": 0.7}
    del scope.names["rate"]  # as a function might do
    scope.fill([Item("rate", 2, 0.7)])
    assert scope.names == {}


def test_the_name_of_a_program_is_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    scope = MainNamespace(Program("a key", "/a.py"), {"__name__": "__mp_main__", "rate": 0.1}, False, imported=True)
    scope.fill([Item(name, scope.version(name), value) for name, value in (("__name__", "__main__"), ("rate", 0.5))])
    assert len(caplog.messages) == 1


class Watching(dict[str, int]):
    def values(self) -> Any:
        seen.append(sent._lock.locked())
        return super().values()


class WatchingTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(sent._lock.locked())
        return super().__torch_function__(function, types, args, kwargs or {})


seen: list[bool] = []
sent = SentGlobals()


@pytest.mark.parametrize("value", [Watching(), torch.ones(1).as_subclass(WatchingTensor)], ids=["dict", "tensor"])
def test_code_of_a_global_runs_without_the_lock_that_each_sent_function_takes(value: Any) -> None:
    seen.clear()
    sent.complete({"value"}, {"value": value}, frozenset())
    sent.note_sent([("value", 1, value)])
    assert seen
    assert not any(seen)


def test_an_object_at_the_address_of_one_that_was_freed_is_not_shared() -> None:
    sent, scope, others = SentGlobals(), {"first": {"part": ["old"]}}, [[""]]
    sent.complete({"first"}, scope, frozenset())
    sent.note_sent([("first", 1, scope["first"])])
    freed = id(scope["first"]["part"])
    del scope["first"]["part"]
    while id(others[-1]) != freed:
        others.append(["new"])
    assert sent.complete({"second"}, scope | {"second": others[-1]}, frozenset()) == {"second"}


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENT)
def test_a_profiler_as_main_program_causes_a_warning(tmp_path: pathlib.Path) -> None:
    text = "import telegrad\nrate = [1]\nwith telegrad.local(['w']): telegrad.rpc.rpc_sync('w', lambda: rate)\n"
    ran = start(tmp_path, text, ["-m", "cProfile", "{file}"])
    assert ran.stderr.count("sends a copy of the global 'rate' with each call") == 1, ran.stdout + ran.stderr


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENT)
@pytest.mark.parametrize("call", ["telegrad.local(['w'])", "telegrad.rpc.init_rpc('x', rank=0, world_size=1)"])
def test_a_group_at_the_top_level_of_a_program_with_a_guard_is_refused(call: str, tmp_path: pathlib.Path) -> None:
    text = f"import telegrad, telegrad.rpc, os\nif 'again' in os.environ: {call}\n" + (
        "if __name__ == '__main__':\n    os.environ['again'] = '1'\n    telegrad.local(['w'])\n"
    )
    ran = start(tmp_path, text, ["{file}"])
    assert ran.returncode == 1
    assert ran.stderr.count("which a worker imports to find its functions: put it under") == 1
    assert not re.search("telegrad/(_core|launch)", ran.stderr)
