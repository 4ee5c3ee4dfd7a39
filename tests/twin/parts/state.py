"""State that stays on a worker between calls: globals, classes of the program, random numbers."""

from tests.twin.making import ANYWHERE, Maker, part


@part(ANYWHERE, common=True)
def counter(m: Maker) -> None:
    f, count = m.fresh("f"), m.fresh("COUNT")
    m.define(f"{count} = 0\n\n\ndef {f}(n):\n    global {count}\n    {count} += n\n    return {count}")
    for _ in range(m.draw.randrange(1, 4)):
        m.see(m.call(f, str(m.number())), f)


@part(ANYWHERE, common=True)
def registry(m: Maker) -> None:
    f, kept = m.fresh("f"), m.fresh("KEPT")
    m.define(
        f"{kept} = {{}}\n\n\ndef {f}(key, value):\n    {kept}.setdefault(key, []).append(value)\n    return {kept}"
    )
    for _ in range(m.draw.randrange(1, 4)):
        m.see(m.call(f, repr(m.choose("a", "b")), str(m.number())), f)


@part(ANYWHERE, common=True)
def singleton(m: Maker) -> None:
    f, server, cls = m.fresh("f"), m.fresh("SERVER"), m.fresh("Server")
    m.define(
        f"""{server} = None


class {cls}:
    made = 0

    def __init__(self):
        {cls}.made += 1
        self.value = 0.0

    def add(self, n):
        self.value += n
        return self.value, {cls}.made


def {f}():
    global {server}
    if {server} is None:
        {server} = {cls}()
    return {server}"""
    )
    to = m.worker()
    for _ in range(m.draw.randrange(1, 4)):
        m.see(f"rpc.remote({to}, {f}).rpc_sync().add({m.number()})", f)


@part(ANYWHERE, common=True)
def global_tensor(m: Maker) -> None:
    f, table = m.fresh("f"), m.fresh("TABLE")
    m.define(
        f"""{table} = draw({m.number()})


def {f}(a, write):
    with torch.no_grad():
        if write:
            {table}[{m.draw.randrange(3)}] += a[0].detach()
        return {table}.clone()"""
    )
    for _ in range(m.draw.randrange(1, 4)):
        m.see(m.call(f, m.tensor(), m.choose("True", "False")), f)


@part(ANYWHERE, common=True)
def global_module(m: Maker) -> None:
    f, model = m.fresh("f"), m.fresh("MODEL")
    m.define(
        f"""{model} = nn.Linear(3, 3, dtype=torch.float64)


def {f}(a):
    with torch.no_grad():
        {model}.bias.add_(1.0)
    return {model}(a).tanh()"""
    )
    m.gain(m.call(f, m.tensor()))
    m.see(f"{model}.bias")


@part(ANYWHERE, common=True)
def class_attributes(m: Maker) -> None:
    f, cls = m.fresh("f"), m.fresh("Settings")
    m.define(
        f"""class {cls}:
    known = []

    @classmethod
    def learn(cls, name):
        cls.known.append(name)
        return list(cls.known)

    @staticmethod
    def twice(n):
        return 2 * n


def {f}(instance, name):
    return type(instance) is {cls}, instance.learn(name), {cls}.known"""
    )
    m.see(m.call(f, f"{cls}()", repr(m.choose("x", "y"))), f)
    m.see(m.call(f"{cls}.learn", repr(m.choose("x", "y"))), f)
    m.see(m.call(f"{cls}.twice", str(m.number())), f)


@part(ANYWHERE, common=True)
def arguments_are_copies(m: Maker) -> None:
    f, a = m.fresh("f"), m.fresh("a")
    m.define(
        f"""def {f}(things, tensor):
    things["more"] = [tensor]
    tensor.mul_(2)
    return things"""
    )
    m.line(f"{a} = {{'given': draw({m.number()}), 'numbers': [1, 2]}}")
    m.see(m.call(f, a, f"{a}['given']"))
    m.see(a)


@part(ANYWHERE, common=True)
def results_are_copies(m: Maker) -> None:
    f, table = m.fresh("f"), m.fresh("TABLE")
    size = m.choose("3", "200")
    m.define(f"{table} = torch.zeros({size}, {size})\n\n\ndef {f}():\n    return {table}")
    to, found = m.worker(), m.fresh("found")
    m.line(f"{found} = rpc.rpc_sync({to}, {f})")
    m.line(f"{found}.add_({m.number()})")
    m.see(f"rpc.rpc_sync({to}, {f})")
    m.see(found)


@part(ANYWHERE, common=True)
def global_random_numbers(m: Maker) -> None:
    f = m.function("(a):\n    return (a + torch.rand(3, 3, dtype=torch.float64)) * 0.5")
    m.gain(m.call(f, m.tensor()))
    m.gain(f"{m.tensor()} * torch.rand(3, dtype=torch.float64)")


@part(ANYWHERE, common=True)
def seeded_random_numbers(m: Maker) -> None:
    f = m.function(f"(a):\n    torch.manual_seed({m.number()})\n    return nn.functional.dropout(a, 0.5)")
    m.gain(m.call(f, m.tensor()) + ".clamp(-1, 1)")


@part(ANYWHERE)
def generator_that_travels(m: Maker) -> None:
    f, g = m.fresh("f"), m.fresh("g")
    m.define(
        f"""def {f}(state):
    generator = torch.Generator()
    generator.set_state(state)
    return torch.rand(3, generator=generator)"""
    )
    m.line(f"{g} = torch.Generator().manual_seed({m.number()})")
    m.see(m.call(f, f"{g}.get_state()"))


@part(ANYWHERE)
def actor(m: Maker) -> None:
    cls, r = m.fresh("Actor"), m.fresh("r")
    m.define(
        f"""@rpc.actor
class {cls}:
    def __init__(self):
        self.values = []

    def add(self, n):
        self.values.append(n)
        return list(self.values)"""
    )
    m.line(f"{r} = rpc.remote({m.worker()}, {cls})")
    m.see(f"[future.wait() for future in [{r}.rpc_async().add(n) for n in range(5)]]")
