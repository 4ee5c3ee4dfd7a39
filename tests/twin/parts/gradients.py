"""Distributed autograd through Functions, hooks, views, in-place writes and sparse gradients."""

from tests.twin.making import INSIDE, Maker, part


@part(INSIDE, common=True)
def leaf_of_a_worker(m: Maker) -> None:
    f = m.function(f"(a):\n    return (a * leaf({m.number()})).tanh()")
    m.gain(m.call(f, m.tensor()))


@part(INSIDE, common=True)
def leaf_of_two_workers(m: Maker) -> None:
    f = m.function(f"(a, b):\n    return (a * leaf({m.number()}) + b).tanh()")
    g = m.function(f"(to, a):\n    own = leaf({m.number()})\n    return rpc.rpc_sync(to, {f}, (a, own)) * own", "g")
    m.gain(m.call(g, m.worker(), m.tensor()))


@part(INSIDE, common=True)
def function(m: Maker) -> None:
    f, cls = m.fresh("f"), m.fresh("Function")
    m.define(
        f"""class {cls}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, scale):
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return a * b * scale, (a + b) * 0.5

    @staticmethod
    def backward(ctx, of_product, of_sum):
        a, b = ctx.saved_tensors
        see('{cls}', [of_product, of_sum])
        return of_product * b * ctx.scale + of_sum * 0.5, of_product * a * ctx.scale + of_sum * 0.5, None


def {f}(a, b):
    product, sum_ = {cls}.apply(a, b, 0.7)
    return {m.choose("product", "sum_", "product + sum_")}"""
    )
    m.gain(m.call(f, m.tensor(), m.tensor()))


@part(INSIDE, common=True)
def function_of_the_new_style(m: Maker) -> None:
    f, cls = m.fresh("f"), m.fresh("Function")
    m.define(
        f"""class {cls}(torch.autograd.Function):
    @staticmethod
    def forward(a, b):
        return (a * b).sin(), a.detach().clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads({m.choose("True", "False")})
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient, none):
        see('{cls}', [gradient, none])
        a, b = ctx.saved_tensors
        return (gradient * (a * b).cos() * b, None) if gradient is not None else (None, None)


def {f}(a, b):
    return {cls}.apply(a, b)[0]"""
    )
    m.gain(m.call(f, m.tensor(), m.tensor()))


@part(INSIDE, common=True)
def function_in_place(m: Maker) -> None:
    f, cls = m.fresh("f"), m.fresh("Function")
    m.define(
        f"""class {cls}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.mark_dirty(a)
        return a.mul_(0.5)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


def {f}(a):
    made = a * 1.0
    {cls}.apply(made)
    return made"""
    )
    m.gain(m.call(f, m.tensor()))


@part(INSIDE, common=True)
def hook_of_a_tensor(m: Maker) -> None:
    f = m.fresh("f")
    change = m.choose("None", "made", "None if made is None else made.clamp(-0.1, 0.1)")
    m.define(
        f"""def {f}(a):
    made = a * leaf({m.number()})

    def hook(gradient):
        made = hooked('{f}', gradient, 2.0)
        return {change}

    made.register_hook(hook)
    return made.tanh()"""
    )
    m.gain(m.call(f, m.tensor()))


@part(INSIDE, common=True)
def hook_of_what_came(m: Maker) -> None:
    f = m.fresh("f")
    m.define(
        f"""def {f}(a):
    if a.requires_grad:
        a.register_hook(lambda gradient: hooked('{f}', gradient, 0.5))
    return a.sin()"""
    )
    m.gain(m.call(f, m.tensor()))


@part(INSIDE, common=True)
def hook_of_a_leaf(m: Maker) -> None:
    f = m.fresh("f")
    seed = m.draw.randrange(1000, 1_000_000)
    m.define(
        f"""def {f}(a):
    own = leaf({seed})
    if not hasattr(own, 'hooked'):
        own.hooked = True
        own.register_hook(lambda gradient: hooked('{f}', gradient, 2.0))
        own.register_post_accumulate_grad_hook(after_{f})
    return (a * own).sin()"""
    )
    m.define(f"def after_{f}(each):\n    hooked('{f} after', each.grad)")
    m.gain(m.call(f, m.tensor()))


@part(INSIDE, common=True)
def hook_of_a_module(m: Maker) -> None:
    f, model = m.fresh("f"), m.fresh("MODEL")
    m.define(
        f"""{model} = nn.Linear(3, 3, dtype=torch.float64)
{model}.register_full_backward_hook(lambda module, given, taken: saw_{model}(given, taken))
{model}.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
{model}.register_forward_hook(lambda module, args, result: result.tanh())
LEAVES[{m.draw.randrange(1000, 1_000_000)}] = {model}.weight


def {f}(a):
    return {model}(a)"""
    )
    m.define(f"def saw_{model}(given, taken):\n    see('{model}', [given, taken])")
    m.gain(m.call(f, m.tensor()))


@part(INSIDE, common=True)
def views_and_writes(m: Maker) -> None:
    how = m.choose(
        "made[0].mul_(b[0])",
        "made[:, 1] = b[:, 0]",
        "made.t()[1].add_(b[2])",
        "made.view(9)[::2].mul_(0.5)",
        "made.unbind(0)[0].sum()",
        "made.diagonal().copy_(b.diagonal())",
        "made.narrow(0, 1, 2).sub_(b[:2])",
        "made.copy_(b)",
        "made.index_add_(0, torch.tensor([0, 0]), b[:2])",
        "made.masked_fill_(b > 0, 0.5)",
    )
    f = m.function(f"(a, b):\n    made = a * 0.9\n    {how}\n    return made.tanh()")
    m.gain(m.call(f, m.tensor(), m.tensor()))


@part(INSIDE, common=True)
def write_to_what_came(m: Maker) -> None:
    f = m.function(f"(a):\n    a.mul_(0.5)\n    return a + leaf({m.number()}) * 0.1")
    m.gain(m.call(f, f"({m.tensor()} * 1.0)"))
    y = m.fresh("y")
    m.line(f"{y} = {m.call('torch.sin', m.tensor())}")
    m.line(f"{y}[{m.draw.randrange(3)}] *= 2")
    m.gain(f"{y} * 0.5")


@part(INSIDE, common=True)
def write_after_the_send(m: Maker) -> None:
    f, y = m.fresh("f"), m.fresh("y")
    m.define(f"def {f}(a):\n    return a * leaf({m.number()})")
    m.line(f"{y} = {m.tensor()} * 1.0")
    x = m.gain(m.call(f, y))
    m.line(f"{y}.mul_(0.5)")
    m.gain(f"({y} + {x}).tanh()")


@part(INSIDE, common=True)
def sparse_gradient(m: Maker) -> None:
    f, table, seed = m.fresh("f"), m.fresh("TABLE"), m.draw.randrange(1000, 1_000_000)
    m.define(
        f"""{table} = nn.Embedding(5, 3, sparse=True, dtype=torch.float64)
LEAVES[{seed}] = {table}.weight


def {f}(a):
    return {table}(torch.tensor([0, 2, 2])) * a"""
    )
    m.gain(m.call(f, m.tensor()) + ".tanh()")


@part(INSIDE, common=True)
def not_used(m: Maker) -> None:
    """Send a tensor that is not used, so that it gets no gradient."""
    f, g = m.fresh("f"), m.fresh("g")
    m.define(f"def {f}(a, b):\n    unused = leaf({m.number()}) * b\n    return a * 0.5, unused")
    m.gain(m.call(f, m.tensor(), f"{m.tensor()} * 1.0") + "[0]")
    m.define(f"def {g}(a, b):\n    return a.sin()")
    m.gain(m.call(g, m.tensor(), f"leaf({m.number()})"))


@part(INSIDE)
def activation_checkpoint(m: Maker) -> None:
    f = m.function(
        f"""(a, b):
    from torch.utils.checkpoint import checkpoint as recompute

    def inner(x, y):
        return nn.functional.dropout((x * y).sin(), 0.3).clamp(-1, 1)

    return recompute(inner, a, b, use_reentrant={m.choose("True", "False")})"""
    )
    m.gain(m.call(f, m.tensor(), m.tensor()))


@part(INSIDE)
def saved_tensors_hooks(m: Maker) -> None:
    f = m.function(
        """(a):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 1.0, lambda x: x * 0.5):
        return (a * a).tanh()"""
    )
    m.gain(m.call(f, m.tensor()))


@part(INSIDE, common=True)
def partly_without_gradients(m: Maker) -> None:
    f = m.function(
        f"""(a, b):
    with torch.no_grad():
        constant = a * leaf({m.number()})
    return constant * b + a.detach() * 0.1"""
    )
    m.gain(m.call(f, m.tensor(), m.tensor()))
    with_ = m.choose("torch.no_grad()", "torch.inference_mode()")
    x = m.fresh()
    m.line(f"with {with_}:\n    {x} = {m.call('torch.sin', m.tensor())}")
    m.see(x)


@part(INSIDE, common=True)
def numbers_with_history(m: Maker) -> None:
    how = m.choose("complex", "float32", "gather", "where", "cat", "einsum", "cumsum", "norm", "solve", "softmax")
    body = {
        "complex": "torch.view_as_real(torch.complex(a, a * 2).exp()).sum(-1).tanh()",
        "float32": "a.float().sin().double()",
        "gather": "a.gather(0, torch.tensor([[0, 1, 2], [2, 2, 0], [1, 1, 1]]))",
        "where": "torch.where(a > 0, a, a * 0.5)",
        "cat": "torch.cat([a[:1], a[1:] * 0.5]).flip(0)",
        "einsum": "torch.einsum('ij,kj->ik', a, a).tanh()",
        "cumsum": "a.cumsum(0).tanh()",
        "norm": "a / (a.norm() + 1)",
        "solve": "torch.linalg.solve(a + 4 * torch.eye(3, dtype=a.dtype), a)",
        "softmax": "a.softmax(1).log_softmax(0).tanh()",
    }[how]
    f = m.function(f"(a):\n    return {body}")
    m.gain(m.call(f, m.tensor()))


@part(INSIDE)
def retained_gradient(m: Maker) -> None:
    """Use `retain_grad` of a tensor in the middle of a graph."""
    f, kept = m.fresh("f"), m.fresh("KEPT")
    m.define(
        f"""{kept} = []


def {f}(a):
    made = a * leaf({m.number()})
    made.retain_grad()
    {kept}.append(made)
    return made.tanh()


def look_{f}():
    for each in {kept}:  # zeros may be in the place of None, as in `hooked`
        see('{f}', each.grad if each.grad is not None and each.grad.any() else None)"""
    )
    m.gain(m.call(f, m.tensor()))
    m.ending.append(f"everywhere(look_{f})")


@part(INSIDE, common=True)
def buffers(m: Maker) -> None:
    f, model = m.fresh("f"), m.fresh("MODEL")
    m.define(
        f"""{model} = nn.BatchNorm1d(3, dtype=torch.float64)
LEAVES[{m.draw.randrange(1000, 1_000_000)}] = {model}.weight


def {f}(a, training):
    {model}.train(training)
    return {model}(a).tanh()


def look_{f}():
    see('{f}', [{model}.running_mean, {model}.running_var, {model}.num_batches_tracked])"""
    )
    m.gain(m.call(f, m.tensor(), m.choose("True", "False")))
    m.line(f"everywhere(look_{f})")
