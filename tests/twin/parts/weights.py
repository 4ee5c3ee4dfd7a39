"""Published weights."""

from tests.twin.making import OUTSIDE, Maker, part


@part(OUTSIDE)
def published_module(m: Maker) -> None:
    name, p, f, cls, v = m.fresh("weights"), m.fresh("p"), m.fresh("f"), m.fresh("Net"), m.fresh("version")
    tied = m.draw.random() < 0.5
    m.define(
        f"""class {cls}(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.last = nn.Linear(3, 3, dtype=torch.float64)
        {"self.last.weight = self.first.weight" if tied else "pass"}

    def forward(self, x):
        return self.last(self.norm(self.first(x)).tanh())


def {f}(owner, number, way):
    subscriber = Subscriber(owner, '{name}')
    version = subscriber.at_least(number)
    network = {cls}().eval()
    getattr(version, way)(network)
    see('{f}', [version.number, version.state, network(draw(3))])
    subscriber.close()"""
    )
    model = m.fresh("model")
    m.line(f"{model} = {cls}()")
    m.line(f"{p} = Publisher('{name}', {model})")
    for _ in range(m.draw.randrange(1, 4)):
        m.line(f"{model}(draw({m.number()}))")
        m.line(f"with torch.no_grad():\n    {model}.first.weight.mul_(0.9)")
        m.line(f"{v} = {p}.publish()")
        m.line(f"rpc.rpc_sync({m.worker()}, {f}, (WORKERS[0], {v}, {m.choose('load_into', 'swap_into')!r}))")
    m.line(f"{p}.close()")


@part(OUTSIDE)
def published_tree(m: Maker) -> None:
    name, p, f, v, source = m.fresh("weights"), m.fresh("p"), m.fresh("f"), m.fresh("version"), m.fresh("source")
    m.define(
        f"""def {f}(owner, number):
    subscriber = Subscriber(owner, '{name}')
    state = subscriber.at_least(number).state
    subscriber.close()
    return state"""
    )
    dtype = m.choose("float32", "float64", "bfloat16", "int64", "complex64", "bool", "uint8")
    m.line(
        f"{source} = {{'a': (draw({m.number()}) * 4).to(torch.{dtype}), 'b': [draw({m.number()}, 4).t(), 'text', 3], "
        f"'c': (torch.empty(0), torch.tensor(2.5), draw({m.number()}, 8)[::2])}}"
    )
    m.line(f"{p} = Publisher('{name}', {source})")
    for _ in range(m.draw.randrange(1, 4)):
        m.line(f"{v} = {p}.publish()")
        m.see(f"rpc.rpc_sync({m.worker()}, {f}, (WORKERS[0], {v}))")
        m.line(f"{source}['c'][1].add_(1)")
    m.line(f"{p}.close()")
