"""Calls of each kind, over one or several workers, and their errors."""

from tests.twin.making import ANYWHERE, Maker, part


@part(ANYWHERE, common=True)
def plain_call(m: Maker) -> None:
    how = m.choose("(a @ b).tanh()", "a * b + 0.1", "(a - b).sin()", "torch.addmm(a, a, b).tanh()", "a[0] + b * 0.5")
    f = m.function(f"(a, b):\n    return {how}")
    m.gain(m.call(f, m.tensor(), m.tensor()))


@part(ANYWHERE, common=True)
def operator_of_torch(m: Maker) -> None:
    m.gain(m.call(m.choose("torch.mul", "torch.add", "torch.minimum"), m.tensor(), m.tensor()) + ".tanh()")


@part(ANYWHERE, common=True)
def keyword_arguments(m: Maker) -> None:
    f = m.function("(a, *more, scale=1.0, **others):\n    return sum(more, a * scale + sum(others.values())).tanh()")
    a, b, c = m.tensor(), m.tensor(), m.tensor()
    m.gain(f"rpc.rpc_sync({m.worker()}, {f}, args=({a}, {b}), kwargs={{'scale': 0.5, 'other': {c}}})")


@part(ANYWHERE, common=True)
def many_at_once(m: Maker) -> None:
    f = m.function("(a, number):\n    return (a * number).cos() * 0.5")
    futures = m.fresh("futures")
    m.line(f"{futures} = [rpc.rpc_async(name, {f}, ({m.tensor()}, place)) for place, name in enumerate(WORKERS)]")
    m.gain(f"sum(each.wait() for each in {futures}).tanh()")


@part(ANYWHERE, common=True)
def callback_of_a_future(m: Maker) -> None:
    f = m.function("(a):\n    return a * 0.5")
    m.gain(f"rpc.rpc_async({m.worker()}, {f}, ({m.tensor()},)).then(lambda future: future.wait() + 0.25).wait()")


@part(ANYWHERE, common=True)
def asynchronous_function(m: Maker) -> None:
    f, g = m.fresh("f"), m.fresh("g")
    m.define(f"def {g}(a, b):\n    return a * b * 0.5")
    m.define(
        f"""@rpc.functions.async_execution
def {f}(to, a, b):
    return rpc.rpc_async(to, {g}, (a, b)).then(lambda future: future.wait() + b * 0.5)"""
    )
    m.gain(m.call(f, m.worker(), m.tensor(), m.tensor()))


@part(ANYWHERE)
def coroutine(m: Maker) -> None:
    f = m.fresh("f")
    m.define(f"async def {f}(a, b):\n    return (a - b) * 0.5")
    m.gain(f"rpc.rpc_sync({m.worker()}, {f}, ({m.tensor()}, {m.tensor()}))")


@part(ANYWHERE)
def closure(m: Maker) -> None:
    f, factor = m.fresh("f"), m.fresh("factor")
    m.line(f"{factor} = 0.5")
    m.line(f"{f} = lambda a: (a * {factor}).tanh() + draw({m.number()})")
    m.gain(f"rpc.rpc_sync({m.worker()}, {f}, ({m.tensor()},))")


@part(ANYWHERE, common=True)
def reference_passed_on(m: Maker) -> None:
    f = m.function("(a):\n    return (a * 1.5).sin()")
    g = m.function("(reference, b):\n    return reference.to_here() * b", "g")
    r = m.fresh("r")
    m.line(f"{r} = rpc.remote({m.worker()}, {f}, ({m.tensor()},))")
    m.see(f"({r}.owner_name(), {r}.is_owner())")
    m.gain(m.call(g, r, m.tensor()))
    m.gain(f"{r}.to_here()")


@part(ANYWHERE, common=True)
def reference_to_a_value_here(m: Maker) -> None:
    g, r = m.fresh("g"), m.fresh("r")
    m.define(f"def {g}(reference):\n    return reference.to_here().mul(0.75)")
    m.line(f"{r} = rpc.RRef({m.tensor()})")
    m.gain(m.call(g, r))
    m.see(f"{r}.local_value() is {r}.to_here()")


@part(ANYWHERE, common=True)
def proxies(m: Maker) -> None:
    cls, r = m.fresh("Thing"), m.fresh("r")
    m.define(
        f"""class {cls}:
    def __init__(self, a):
        self.a, self.calls = a, 0

    def times(self, b, scale=1.0):
        self.calls += 1
        return self.a * b * scale

    def count(self):
        return self.calls"""
    )
    m.line(f"{r} = rpc.remote({m.worker()}, {cls}, ({m.tensor()},))")
    m.gain(f"{r}.rpc_sync().times({m.tensor()}, scale=0.5)")
    m.gain(f"{r}.rpc_async().times({m.tensor()}).wait()")
    m.gain(f"{r}.remote().times({m.tensor()}).to_here()")
    m.see(f"{r}.rpc_sync().count()")


@part(ANYWHERE)
def stream(m: Maker) -> None:
    f, s = m.fresh("f"), m.fresh("s")
    m.define(
        f"""def {f}(a, n):
    for number in range(n):
        yield (a + number).cos()
    return a * 0.5"""
    )
    m.line(f"{s} = rpc.rpc_stream({m.worker()}, {f}, ({m.tensor()}, {m.draw.randrange(1, 5)}))")
    m.gain(f"sum({s}).tanh()")
    m.gain(f"{s}.value")


@part(ANYWHERE)
def stream_that_fails(m: Maker) -> None:
    f = m.function("(n):\n    yield n\n    yield [n]\n    raise ValueError(f'no more than {n}')")
    m.line(
        f"""with rpc.rpc_stream({m.worker()}, {f}, ({m.number()},)) as items:
    try:
        for item in items:
            see("{f}", item)
    except ValueError as error:
        see("{f}", error)"""
    )


@part(ANYWHERE, common=True)
def exception(m: Maker) -> None:
    f, cls, g = m.fresh("f"), m.fresh("Failure"), m.fresh("g")
    m.define(f"class {cls}(LookupError):\n    pass")
    how = m.choose(
        f"{cls}('it is not there')",
        "KeyError('a key')",
        "ValueError('a', 2)",
        "ZeroDivisionError()",
        "AssertionError('said')",
        "OSError(2, 'no such thing')",
        "RuntimeError('several\\nlines')",
        "UnicodeDecodeError('utf-8', b'x', 0, 1, 'bad')",
        "StopIteration(3)",
    )
    m.define(f"def {f}():\n    raise {how}")
    m.define(
        f"""def {g}(to):
    try:
        return rpc.rpc_sync(to, {f})
    except Exception as error:
        see('{g}', error)
        raise"""
    )
    m.see_error(f, m.call(g, m.worker()))


@part(ANYWHERE, common=True)
def exception_of_torch(m: Maker) -> None:
    f = m.function(f"(a):\n    return a @ torch.ones({m.draw.choice([2, 4, 5])}, 2, dtype=a.dtype)")
    m.see_error(f, m.call(f, m.tensor()))


@part(ANYWHERE, common=True)
def recursion(m: Maker) -> None:
    f = m.fresh("f")
    m.define(
        f"""def {f}(a, depth):
    if depth == 0:
        return a
    return rpc.rpc_sync(WORKERS[depth % len(WORKERS)], {f}, (a * leaf(depth), depth - 1)) + a * 0.1"""
    )
    m.gain(m.call(f, m.tensor(), str(m.draw.randrange(5))) + ".tanh()")
