"""Objects that are sent, of the program and of Python: functions, dataclasses, enums, arrays."""

from tests.twin.making import ANYWHERE, Maker, part


@part(ANYWHERE, common=True)
def functions_as_values(m: Maker) -> None:
    f = m.function("(a):\n    return a * 0.5")
    g = m.function(f"(function, a):\n    return function(a) + {f}(a)", "g")
    m.gain(m.call(g, m.choose(f, "torch.sin", "torch.nn.functional.softplus", "torch.Tensor.tanh"), m.tensor()))


@part(ANYWHERE)
def partial(m: Maker) -> None:
    f = m.function("(scale, a, shift=0.0):\n    return (a * scale + shift).tanh()")
    m.line("import functools")
    m.gain(f"rpc.rpc_sync({m.worker()}, functools.partial({f}, 0.5, shift=0.1), ({m.tensor()},))")


@part(ANYWHERE)
def bound_method(m: Maker) -> None:
    cls, thing = m.fresh("Thing"), m.fresh("thing")
    m.define(
        f"""class {cls}:
    def __init__(self, a):
        self.a, self.calls = a, 0

    def times(self, b):
        self.calls += 1
        return self.a * b, self.calls"""
    )
    m.line(f"{thing} = {cls}({m.tensor()})")
    m.gain(f"rpc.rpc_sync({m.worker()}, {thing}.times, ({m.tensor()},))[0]")
    m.see(f"{thing}.calls")


@part(ANYWHERE)
def standard_classes(m: Maker) -> None:
    f, kind, point, pair = m.fresh("f"), m.fresh("Kind"), m.fresh("Point"), m.fresh("Pair")
    m.define(
        f"""import collections
import dataclasses
import enum


class {kind}(enum.Enum):
    ONE = 1
    TWO = 2


@dataclasses.dataclass
class {point}:
    x: object
    kind: {kind} = {kind}.ONE


{pair} = collections.namedtuple('{pair}', 'a b')


def {f}(point, pair, many):
    point.x = point.x * 0.5
    return point, point.kind is {kind}.TWO, pair, type(pair) is {pair}, many, type(many).__name__"""
    )
    many = m.choose("collections.OrderedDict(b=1, a=2)", "collections.deque([1, 2])", "collections.Counter('aab')")
    m.see(m.call(f, f"{point}({m.tensor()}, {kind}.TWO)", f"{pair}(1, {m.tensor()})", many))


@part(ANYWHERE)
def arrays(m: Maker) -> None:
    size = m.choose("(3, 3)", "(200, 100)", "()")
    f = m.function("(a):\n    return torch.as_tensor(a * 2), str(a.dtype), a.shape")
    m.see(m.call(f, f"torch.full({size}, 1.5, dtype=torch.{m.choose('float64', 'float32', 'int16')}).numpy()"))


@part(ANYWHERE)
def own_pickling(m: Maker) -> None:
    f, cls = m.fresh("f"), m.fresh("Thing")
    m.define(
        f"""class {cls}:
    def __init__(self, a):
        self.a, self.cache = a, 1

    def __getstate__(self):
        return {{'a': self.a}}

    def __setstate__(self, state):
        self.a, self.cache = state['a'], 'anew'


def {f}(thing):
    return thing.a * 0.5, thing.cache, thing"""
    )
    m.see(m.call(f, f"{cls}({m.tensor()})"))


@part(ANYWHERE, common=True)
def large_values(m: Maker) -> None:
    f = m.function("(text, data, many):\n    return len(text), data[-3:], sum(many), text[:3] + data.hex()[:4]")
    text, data = f"'é' * {m.number() * 500}", f"bytes(range(256)) * {m.number() * 2}"
    m.see(m.call(f, text, data, f"list(range({m.number() * 9}))"))


@part(ANYWHERE, common=True)
def an_object_twice(m: Maker) -> None:
    f, thing = m.fresh("f"), m.fresh("thing")
    m.define(f"def {f}(a, b):\n    a.append(b)\n    return a[0] is b, a")
    m.line(f"{thing} = [{m.number()}]")
    m.see(m.call(f, f"[{thing}, 1]", thing))
    m.see(thing)


@part(ANYWHERE, common=True)
def objects_that_are_kept(m: Maker) -> None:
    """Use a reference to an object of the program, whose methods change it, on several workers."""
    cls, r, f = m.fresh("Store"), m.fresh("r"), m.fresh("f")
    m.define(
        f"""class {cls}:
    def __init__(self):
        self.values = {{}}

    def put(self, key, value):
        self.values[key] = value
        return sorted(self.values)

    def get(self, key):
        return self.values[key]


def {f}(reference, key, value):
    return reference.rpc_sync().put(key, value)"""
    )
    m.line(f"{r} = rpc.remote({m.worker()}, {cls})")
    m.see(m.call(f, r, "'a'", m.tensor()))
    m.see(m.call(f, r, "'b'", str(m.number())))
    m.gain(f"{r}.rpc_sync().get('a')")
    m.line(f"try:\n    {r}.rpc_sync().get('c')\nexcept KeyError as error:\n    see('{f}', error)")
