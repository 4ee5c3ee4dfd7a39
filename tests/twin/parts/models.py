"""Modules on workers, optimizers over them, steps of training, checkpoints."""

from tests.twin.making import INSIDE, OUTSIDE, Maker, part

OPTIMIZERS = [
    "torch.optim.SGD, {params}, lr=0.1",
    "torch.optim.SGD, {params}, lr=0.1, momentum=0.9, nesterov=True",
    "torch.optim.SGD, {params}, lr=0.1, momentum=0.9, weight_decay=0.1, maximize=True",
    "torch.optim.Adam, {params}, lr=0.01",
    "torch.optim.Adam, {params}, lr=0.01, amsgrad=True, foreach=True",
    "torch.optim.Adam, {params}, lr=0.01, fused=True",
    "torch.optim.AdamW, {params}, lr=0.01, weight_decay=0.1",
    "torch.optim.NAdam, {params}, lr=0.01",
    "torch.optim.RAdam, {params}, lr=0.01",
    "torch.optim.Adagrad, {params}, lr=0.1",
    "torch.optim.Adadelta, {params}",
    "torch.optim.Adamax, {params}",
    "torch.optim.RMSprop, {params}, lr=0.01, momentum=0.5, centered=True",
    "torch.optim.Rprop, {params}",
    "torch.optim.ASGD, {params}",
]
SCHEDULERS = [
    "StepLR({}, 1, 0.5)",
    "ExponentialLR({}, 0.9)",
    "CosineAnnealingLR({}, 4)",
    "LambdaLR({}, lambda epoch: 1 / (epoch + 1))",
    "OneCycleLR({}, 0.2, total_steps=20, cycle_momentum=False)",
    "LinearLR({})",
]

MODULES = ["nn.Linear, (3, 3)", "nn.LayerNorm, (3,)", "nn.Bilinear, (3, 3, 3)", "nn.GRUCell, (3, 3)"]


def layer(m: Maker) -> str:
    """Define a module class that records its inputs and outputs."""
    cls = m.fresh("Layer")
    act = m.choose("torch.tanh", "torch.sin", "nn.functional.softplus")
    m.define(
        f"""class {cls}(nn.Module):
    def __init__(self, seed, scale=1.0):
        super().__init__()
        self.weight = nn.Parameter(draw(seed))
        self.bias = nn.Parameter(draw(seed + 1, 3))
        self.register_buffer('calls', torch.zeros((), dtype=torch.float64))
        self.scale = scale

    def forward(self, x, factor=1.0):
        if self.training:
            self.calls += 1
        return {act}(x @ self.weight + self.bias) * self.scale * factor * 0.5

    def look(self):
        return [self.weight, self.bias, self.calls, self.training]"""
    )
    return cls


@part(INSIDE, common=True)
def remote_module(m: Maker) -> None:
    cls, model = layer(m), m.fresh("model")
    m.line(f"{model} = RemoteModule({m.worker()}, {cls}, ({m.number()},), {{'scale': 0.8}})")
    m.gain(f"{model}({m.tensor()})")
    m.gain(f"{model}({m.tensor()}, factor=0.5)")
    m.gain(f"{model}.forward_async({m.tensor()}).wait()")
    m.see(f"{model}.get_module_rref().rpc_sync().look()")
    m.ending.append(f"see('{model}', [each.rpc_sync().sum() for each in {model}.remote_parameters()])")


@part(INSIDE, common=True)
def remote_module_passed_on(m: Maker) -> None:
    cls, model, f = layer(m), m.fresh("model"), m.fresh("f")
    m.define(f"def {f}(model, x):\n    return model(x) + x * 0.5")
    m.line(f"{model} = RemoteModule({m.worker()}, {cls}, ({m.number()},))")
    m.gain(m.call(f, model, m.tensor()))


@part(INSIDE)
def module_of_torch(m: Maker) -> None:
    model = m.fresh("model")
    kind = m.draw.choice(MODULES)
    x = f"{m.tensor()}, {m.tensor()}" if "Bilinear" in kind or "GRU" in kind else m.tensor()
    m.line(f"{model} = RemoteModule({m.worker()}, {kind}, {{'dtype': torch.float64}})")
    m.gain(f"{model}({x}).tanh()")


@part(INSIDE)
def module_inside_of_a_module(m: Maker) -> None:
    cls, model = layer(m), m.fresh("model")
    m.line(f"torch.manual_seed({m.number()})")
    m.line(
        f"{model} = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), "
        f"RemoteModule({m.worker()}, {cls}, ({m.number()},)), nn.Tanh())"
    )
    m.gain(f"{model}({m.tensor()})")
    m.line(f"{model}.eval()")
    m.gain(f"{model}({m.tensor()})")
    m.see(f"{model}.state_dict()")


@part(INSIDE)
def module_sent_by_value(m: Maker) -> None:
    cls, model, f = layer(m), m.fresh("model"), m.fresh("f")
    m.define(f"def {f}(model, x):\n    return model(x), model.calls")
    m.line(f"{model} = {cls}({m.number()})")
    x = m.fresh()
    m.line(f"{x} = {m.call(f, model, m.tensor())}")
    m.see(x)
    m.gain(f"{x}[0]")
    m.see(f"{model}.calls")
    m.ending.append(f"see('{model}', autograd.get_gradients({{context}}).get({model}.weight))")


def models(m: Maker) -> tuple[str, list[str]]:
    """Make a model over several workers; return its name, and expressions that describe its parts."""
    model, parts = m.fresh("model"), []
    for _ in range(m.draw.randrange(1, 4)):
        cls, each = layer(m), m.fresh("layer")
        m.line(f"{each} = RemoteModule({m.worker()}, {cls}, ({m.number()},))")
        parts.append(each)
    own = layer(m)
    m.line(f"{model} = nn.Sequential({', '.join(parts)}, {own}({m.number()}))")
    return model, [*(f"{each}.get_module_rref().rpc_sync().look()" for each in parts), f"{model}[-1].look()"]


def step(m: Maker, model: str, optimizer: str, way: str, context: str = "") -> None:
    context = context or m.fresh("c")
    backward, stepping = f"autograd.backward({context}, [loss])", f"{optimizer}.step({context})"
    lines = {
        "apart": [backward, stepping],
        "with": [f"autograd.backward({context}, [loss], step={optimizer})"],
        "clipped": [backward, f"see('norm', clip_grad_norm_({context}, {optimizer}, 0.5))", stepping],
    }[way]
    m.line(
        "\n    ".join(
            [
                f"with autograd.context() as {context}:",
                f"loss = ({model}(draw({m.number()})) - 0.1).pow(2).sum()",
                "see('loss', loss)",
                *lines,
            ]
        )
    )


@part(OUTSIDE)
def training(m: Maker) -> None:
    model, looks = models(m)
    optimizer = m.fresh("optimizer")
    arguments = m.draw.choice(OPTIMIZERS).format(params=model)
    m.line(f"{optimizer} = DistributedOptimizer.for_module({arguments})")
    schedule = m.draw.random() < 0.4
    if schedule:
        m.line(f"{optimizer}_schedule = torch.optim.lr_scheduler.{m.draw.choice(SCHEDULERS).format(optimizer)}")
    for _ in range(m.draw.randrange(1, 5)):
        step(m, model, optimizer, m.choose("apart", "with", "clipped"))
        if schedule:
            m.line(f"{optimizer}_schedule.step()")
            m.see(f"[group['lr'] for group in {optimizer}.param_groups]")
        elif m.draw.random() < 0.2:
            m.line(f"{optimizer}.param_groups[0]['lr'] *= 0.5")
    m.see_all(looks)


@part(OUTSIDE)
def parameter_groups(m: Maker) -> None:
    model, looks = models(m)
    optimizer, first = m.fresh("optimizer"), m.fresh("first")
    m.line(f"{first} = {model}[0].remote_parameters() if hasattr({model}[0], 'remote_parameters') else []")
    own = f"{{'params': [rpc.RRef(each) for each in {model}[-1].parameters()]}}"
    m.line(f"{first} = [{{'params': {first}, 'lr': 0.05}}, {own}]")
    m.line(f"{optimizer} = DistributedOptimizer({m.draw.choice(OPTIMIZERS).format(params=first)})")
    for _ in range(m.draw.randrange(1, 4)):
        step(m, model, optimizer, m.choose("apart", "with", "clipped"))
    m.see_all(looks)


@part(OUTSIDE, common=True)
def optimizer_of_references(m: Maker) -> None:
    seed = m.draw.randrange(1000, 1_000_000)
    f = m.function(f"():\n    return leaf({seed})")
    g = m.function(f"(x):\n    return (leaf({seed}) * x).tanh()", "g")
    r, optimizer, c = m.fresh("r"), m.fresh("optimizer"), m.fresh("c")
    a, b = m.worker(), m.worker()
    m.line(f"{r} = [rpc.remote(name, {f}) for name in dict.fromkeys([{a}, {b}])]")
    m.line(f"{optimizer} = DistributedOptimizer(torch.optim.SGD, {r}, lr=0.1, momentum=0.5)")
    for _ in range(m.draw.randrange(1, 4)):
        m.line(
            f"""with autograd.context() as {c}:
    loss = (rpc.rpc_sync({a}, {g}, (draw({m.number()}),)) + rpc.rpc_sync({b}, {g}, (draw({m.number()}),))).sum()
    autograd.backward({c}, [loss])
    {optimizer}.step({c})"""
        )
    m.see(f"[each.to_here() for each in {r}]")


@part(OUTSIDE)
def checkpoints(m: Maker) -> None:
    model, looks = models(m)
    optimizer, folder = m.fresh("optimizer"), m.fresh("folder")
    m.line(f"{optimizer} = DistributedOptimizer.for_module({m.draw.choice(OPTIMIZERS).format(params=model)})")
    m.line(
        f"{folder}_state = {{'model': {model}, 'optimizer': {optimizer}, 'step': 3, 'lists': [1, draw({m.number()})]}}"
    )
    step(m, model, optimizer, "apart")
    m.line(f"{folder} = FOLDER + '/{folder}'")
    m.line(f"checkpoint.save({folder}_state, {folder})")
    step(m, model, optimizer, "with")
    m.line(f"{folder}_state['step'] = 5")
    m.see_all(looks)
    m.line(f"checkpoint.load({folder}_state, {folder})")
    m.see(f"[{folder}_state['step'], {folder}_state['lists']]")
    m.see_all(looks)
    step(m, model, optimizer, "apart")
    m.see_all(looks)
