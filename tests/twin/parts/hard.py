"""Rare uses of autograd and optimizers: second orders, failures in backward, several optimizers at once."""

from tests.twin.making import INSIDE, OUTSIDE, Maker, part
from tests.twin.parts.models import OPTIMIZERS, layer, models


@part(OUTSIDE)
def second_order(m: Maker) -> None:
    seed = m.draw.randrange(1000, 1_000_000)
    f = m.function(f"(x):\n    return (x * leaf({seed})).tanh()")
    g = m.function(f"(number):\n    return (autograd.get_gradients(number)[leaf({seed})] ** 2).sum()", "g")
    c = m.fresh("c")
    m.define(  # torch keeps the graph of the first pass at the sum of both
        f"""def second_{g}(number):
    try:
        see('{g}', autograd.get_gradients(number)[leaf({seed})].detach())
    except (RuntimeError, KeyError):
        pass"""
    )
    to = m.worker()
    m.line(
        f"""with autograd.context() as {c}:
    loss = rpc.rpc_sync({to}, {f}, (draw({m.number()}),)).pow(2).sum()
    autograd.backward({c}, [loss], create_graph=True)
    everywhere(see_gradients, 'first {c}', {c})
    penalty = rpc.rpc_sync({to}, {g}, ({c},))
    autograd.backward({c}, [penalty])
    everywhere(second_{g}, {c})"""
    )


@part(OUTSIDE)
def failure_in_backward(m: Maker) -> None:
    f, cls, c = m.fresh("f"), m.fresh("Function"), m.fresh("c")
    m.define(
        f"""class {cls}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a * 1.0

    @staticmethod
    def backward(ctx, gradient):
        raise {m.choose("ValueError('it failed')", "KeyError('a')", "RuntimeError('it failed')")}


def {f}(a):
    return {cls}.apply(a * leaf({m.number()}))"""
    )
    passed = f"autograd.backward({c}, [rpc.rpc_sync({m.worker()}, {f}, (draw(1),)).sum()])"
    m.see_error(f, f"with autograd.context() as {c}:\n        {passed}")


@part(OUTSIDE)
def write_that_backward_finds(m: Maker) -> None:
    seed = m.draw.randrange(1000, 1_000_000)
    f = m.function(f"(a):\n    return (a * leaf({seed})).exp().sum()")
    g = m.function(f"():\n    with torch.no_grad():\n        leaf({seed}).add_(1)", "g")
    c = m.fresh("c")
    to = m.worker()
    m.line(
        f"""try:
    with autograd.context() as {c}:
        loss = rpc.rpc_sync({to}, {f}, (draw({m.number()}).requires_grad_(),))
        rpc.rpc_sync({to}, {g})
        autograd.backward({c}, [loss])
except RuntimeError as error:
    see('{f}', error)"""
    )


@part(OUTSIDE)
def several_optimizers(m: Maker) -> None:
    model, looks = models(m)
    first, second, c = m.fresh("first"), m.fresh("second"), m.fresh("c")
    m.line(f"{first} = DistributedOptimizer.for_module({m.draw.choice(OPTIMIZERS).format(params=model)})")
    m.line(f"{second} = DistributedOptimizer.for_module({m.draw.choice(OPTIMIZERS).format(params=model + '[0]')})")
    for _ in range(m.draw.randrange(1, 4)):
        m.line(
            f"""with autograd.context() as {c}:
    loss = {model}(draw({m.number()})).pow(2).sum()
    autograd.backward({c}, [loss])
    {first}.step({c})
    {second}.step({c})"""
        )
    m.see_all(looks)


@part(OUTSIDE)
def clipped_steps(m: Maker) -> None:
    model, looks = models(m)
    optimizer, clipped, c = m.fresh("optimizer"), m.fresh("clipped"), m.fresh("c")
    norm = m.choose("2.0", "1.0", "float('inf')", "3.0")
    m.line(f"{optimizer} = DistributedOptimizer.for_module({m.draw.choice(OPTIMIZERS).format(params=model)})")
    m.line(f"{clipped} = {optimizer}.clipped(0.3, {norm})")
    for _ in range(m.draw.randrange(1, 4)):
        m.line(
            f"""with autograd.context() as {c}:
    autograd.backward({c}, [{model}(draw({m.number()})).pow(2).sum()], step={clipped})
see('norm', {clipped}.norm)"""
        )
    m.see_all(looks)


@part(OUTSIDE)
def kept_gradients(m: Maker) -> None:
    """Step with the gradients of several contexts."""
    model, looks = models(m)
    optimizer, c = m.fresh("optimizer"), m.fresh("c")
    m.line(f"{optimizer} = DistributedOptimizer.for_module({m.draw.choice(OPTIMIZERS).format(params=model)})")
    for number in range(m.draw.randrange(2, 4)):
        last = f"{optimizer}.step({c})" if number else f"{optimizer}.accumulate({c})"
        m.line(
            f"""with autograd.context() as {c}:
    autograd.backward({c}, [{model}(draw({m.number()})).pow(2).sum()])
    {last}"""
        )
    m.see_all(looks)


@part(OUTSIDE)
def states_of_models_and_optimizers(m: Maker) -> None:
    model, looks = models(m)
    optimizer, state, c = m.fresh("optimizer"), m.fresh("state"), m.fresh("c")
    m.line(f"{optimizer} = DistributedOptimizer.for_module({m.draw.choice(OPTIMIZERS).format(params=model)})")
    step = f"""with autograd.context() as {c}:
    autograd.backward({c}, [{model}(draw({m.number()})).pow(2).sum()])
    {optimizer}.step({c})"""
    m.line(step)
    m.line(f"{state} = {model}.state_dict(), {optimizer}.state_dict()")
    m.see(f"{state}[0]")
    m.line(step)
    m.line(f"{model}.load_state_dict({state}[0])")
    m.line(f"{optimizer}.load_state_dict({state}[1])")
    m.line(step)
    m.see_all(looks)


@part(OUTSIDE)
def frozen_parameters(m: Maker) -> None:
    cls, model, optimizer, c = layer(m), m.fresh("model"), m.fresh("optimizer"), m.fresh("c")
    m.line(f"{model} = RemoteModule({m.worker()}, {cls}, ({m.number()},))")
    m.define(f"def freeze_{model}(module):\n    module.local_value().weight.requires_grad_(False)")
    reference = f"{model}.get_module_rref()"
    m.line(f"{optimizer} = DistributedOptimizer.for_module(torch.optim.SGD, {model}, lr=0.1, weight_decay=0.1)")
    for number in range(3):
        m.line(
            f"""with autograd.context() as {c}:
    autograd.backward({c}, [{model}(draw({m.number()})).pow(2).sum()])
    {optimizer}.step({c})"""
        )
        if number == 0:
            m.line(f"rpc.rpc_sync({reference}.owner_name(), freeze_{model}, ({reference},))")
    m.see(f"{reference}.rpc_sync().look()")


@part(INSIDE)
def parametrized_module(m: Maker) -> None:
    f, model = m.fresh("f"), m.fresh("MODEL")
    how = m.choose("weight_norm", "spectral_norm", "orthogonal")
    m.define(
        f"""{model} = nn.utils.parametrizations.{how}(nn.Linear(3, 3, dtype=torch.float64))
LEAVES[{m.draw.randrange(1000, 1_000_000)}] = [*{model}.parameters()][-1]


def {f}(a):
    return {model}(a).tanh()"""
    )
    m.gain(m.call(f, m.tensor()))


@part(INSIDE)
def drop_out_of_a_module(m: Maker) -> None:
    model = m.fresh("model")
    m.line(f"{model} = RemoteModule({m.worker()}, nn.Dropout, (0.4,))")
    m.gain(f"{model}({m.tensor()}).tanh()")
    m.line(f"{model}.eval()")
    m.gain(f"{model}({m.tensor()})")


@part(INSIDE)
def recurrent_and_attention(m: Maker) -> None:
    model = m.fresh("model")
    made, use = m.draw.choice(
        [
            ("nn.LSTM, (3, 3), {'dtype': torch.float64}", "[0]"),
            ("nn.MultiheadAttention, (3, 1), {'dtype': torch.float64}", "[0]"),
            ("nn.GRU, (3, 3, 2), {'dtype': torch.float64}", "[0]"),
            ("nn.TransformerEncoderLayer, (3, 1, 5), {'dtype': torch.float64, 'dropout': 0.2}", ""),
        ]
    )
    m.line(f"{model} = RemoteModule({m.worker()}, {made})")
    x = m.tensor()
    m.gain(f"{model}({', '.join([x, x, x] if 'Attention,' in made else [x])}){use}.tanh()")


@part(INSIDE)
def transformed_functions(m: Maker) -> None:
    how = m.choose(
        "torch.func.vmap(lambda row: row.sin() * row.sum())(a)",
        "torch.func.grad(lambda x: (x ** 3).sum())(a)",
        "torch.func.jvp(torch.tanh, (a,), (a,))[1]",
        "torch.func.vjp(torch.sin, a)[1](a)[0]",
    )
    f = m.function(f"(a):\n    return ({how}).tanh()")
    m.gain(m.call(f, m.tensor()))


@part(INSIDE)
def subclass_with_history(m: Maker) -> None:
    f, cls = m.fresh("f"), m.fresh("Marked")
    m.define(f"class {cls}(torch.Tensor):\n    pass")
    m.define(f"def {f}(a):\n    return type(a).__name__, (a * leaf({m.number()}))")
    x = m.fresh()
    m.line(f"{x} = {m.call(f, f'{m.tensor()}.as_subclass({cls})')}")
    m.see(x)
    m.gain(f"{x}[1].as_subclass(torch.Tensor).tanh()")


@part(INSIDE)
def gradients_of_given_tensors(m: Maker) -> None:
    """Use `telegrad.autograd.grad` on the driver and elsewhere, and torch's own on one worker."""
    f, g, x = m.fresh("f"), m.fresh("g"), m.fresh()
    m.define(f"def {f}(a):\n    return (a * leaf({m.number()})).tanh()")
    m.define(
        f"""def {g}(number, to, a):
    own = a * leaf({m.number()})
    slope, unused = autograd.grad(
        number, rpc.rpc_sync(to, {f}, (own,)).sum(), [own, leaf(0)], create_graph=True, allow_unused=True
    )
    return slope.sin() + a if unused is None else slope + unused"""
    )
    m.line(f"{x} = leaf({m.number()})")
    m.see(f"torch.autograd.grad(({x}.sin() + {x} * 0.5).sum(), {x})")
    m.see(f"autograd.grad({m.context}, ({m.call(f, x)} + {x} * 0.5).sum(), {x})")
    m.gain(f"autograd.grad({m.context}, {m.call(f, x)}.sum(), {x}, create_graph=True)[0].tanh()")
    m.gain(f"rpc.rpc_sync({m.worker()}, {g}, ({m.context}, {m.worker()}, {m.tensor()}))")


@part(INSIDE)
def gradients_of_what_is_there(m: Maker) -> None:
    """Differentiate through tensors of earlier parts.

    The records of those parts are not compared then: workers also run functions that lead to none of the inputs.
    """
    output, inputs = m.tensors[-1], dict.fromkeys([m.tensor(), m.tensor()])
    options = "grad_outputs=draw(1), retain_graph=True, allow_unused=True"
    found, kept = m.fresh("found"), m.fresh("KEPT")
    m.define(f"def keep_{kept}():\n    global {kept}\n    {kept} = __import__('copy').deepcopy(SEEN)")
    m.define(f"def back_{kept}():\n    SEEN.clear()\n    SEEN.update(__import__('copy').deepcopy({kept}))")
    m.line(
        f"""everywhere(keep_{kept})
try:
    {found} = autograd.grad({m.context}, {output}, [{", ".join(inputs)}], {options})
except Exception:  # torch says it otherwise
    {found} = "an error"
everywhere(back_{kept})
see("{found}", {found})"""
    )


@part(INSIDE)
def roots_that_are_references(m: Maker) -> None:
    f = m.function(f"(a):\n    return (a * leaf({m.number()})).sum()")
    r = m.fresh("r")
    m.line(f"{r} = rpc.remote({m.worker()}, {f}, ({m.tensor()},))")
    m.line(f"autograd.backward({m.context}, [{r}, (leaf(1) * {m.tensor()}).sum()], retain_graph=True)")
    m.line(f"everywhere(see_gradients, 'gradients of {r}', {m.context})")
