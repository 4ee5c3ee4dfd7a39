"""What is right as it is in one process: hooks, functions and modes of torch's autograd.

Each program runs twice: in one process, and with its calls, modules and optimizers on another worker.
"""

from __future__ import annotations

RIGHT = {
    "hooks of the nodes of a graph": """
seen = []
y = call(torch.sin, x * 2)
y.grad_fn.register_hook(lambda gi, go: seen.append(go[0].clone()))
y.grad_fn.register_prehook(lambda go: (go[0] * 2,))
backward(y.sum())
found = [seen, *gradients(x)]
""",
    "hooks of the node that adds up the gradient of a leaf": """
seen = []
weight = nn.Parameter(leaf(seed=4).detach())
node = torch.autograd.graph.get_gradient_edge(weight).node
node.register_hook(lambda given, taken: seen.append((taken, weight.grad.clone())))
node.register_prehook(lambda gradients: (gradients[0] * 2,))
backward(call(torch.mul, weight, x).sum() + (weight * 3).sum())
found = [seen, *gradients(x, weight)]
""",
    "optimizers that step in such hooks": """
from torch.distributed.optim import _apply_optimizer_in_backward
layer = nn.Linear(3, 3).double()
_apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.1})
backward(call(torch.sin, layer(x)).sum())
found = layer.state_dict()
""",
    "hooks of what was received": """
def f(a):
    a.register_hook(lambda g: g * 3)
    return a * 2
backward(call(f, x).sum())
found = gradients(x)
""",
    "`grad` of a `grad` with `create_graph`": """
y = call(torch.sin, x).sum()
g, = grad(y, [x], create_graph=True)
h, = grad(g.sum(), [x])
found = h
""",
    "second derivatives of a `Function`": """
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a ** 3
    @staticmethod
    def backward(ctx, g):
        return g * 3 * ctx.saved_tensors[0] ** 2
def f(a):
    return F.apply(a)
y = call(f, x).sum()
g, = grad(y, [x], create_graph=True)
backward(g.sum())
found = gradients(x)
""",
    "`torch.autograd.grad` inside of a function that is called, of what it received": """
def f(a):
    return torch.autograd.grad(a.sin().sum(), a, create_graph=True)[0]
backward(call(f, x).sum())
found = gradients(x)
""",
    "`mark_dirty`": """
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        a.add_(1)
        ctx.mark_dirty(a)
        return a
    @staticmethod
    def backward(ctx, g):
        return g * 2
def f(a):
    return F.apply(a)
backward(call(f, x * 1).sum())
found = gradients(x)
""",
    "`mark_non_differentiable`": """
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        b = a > 0
        c = a.floor()
        ctx.mark_non_differentiable(b, c)
        return a * 2, b, c
    @staticmethod
    def backward(ctx, g, h, i):
        return g * 2
def f(a):
    return F.apply(a)
y, b, c = call(f, x)
backward(y.sum())
found = [b, c, *gradients(x)]
""",
    "`set_materialize_grads`": """
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.set_materialize_grads(False)
        return a * 2, a * 3
    @staticmethod
    def backward(ctx, g, h):
        assert h is None
        return g * 2
def f(a):
    return F.apply(a)
y, b = call(f, x)
backward(y.sum())
found = gradients(x)
""",
    "`clear_saved_tensors_on_access`": """
class F(torch.autograd.Function):
    clear_saved_tensors_on_access = True
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.sin()
    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()
def f(a):
    return F.apply(a)
backward(call(f, x).sum())
found = gradients(x)
""",
    "`torch.library.custom_op` with `register_autograd`": """
@torch.library.custom_op("telegrad_limits::twice", mutates_args=())
def twice(a: torch.Tensor) -> torch.Tensor:
    return a * 2
twice.register_autograd(lambda ctx, g: g * 2)
def f(a):
    return torch.ops.telegrad_limits.twice(a)
backward(call(f, x).sum())
found = gradients(x)
""",
    "`allow_mutation_on_saved_tensors`": """
with torch.autograd.graph.allow_mutation_on_saved_tensors():
    y = x * 2
    z = call(torch.sin, y) + y.sin()
    y.add_(1)
    backward(z.sum())
found = gradients(x)
""",
    "`set_multithreading_enabled`": """
with torch.autograd.set_multithreading_enabled(False):
    backward(call(torch.sin, x).sum())
found = gradients(x)
""",
    "anomaly mode around a pass": """
y = call(torch.sqrt, x * 0 - 1)
try:
    with torch.autograd.detect_anomaly():
        backward(y.sum())
    found = "no error"
except RuntimeError as e:
    found = type(e).__name__
""",
    "a pass inside of `with torch.device(...)`": """
with torch.device("meta"):
    y = call(torch.sin, x)
    backward(y.sum())
found = gradients(x)
""",
    "writes in place to results, and to what was sent": """
y = call(torch.sin, x)
y.mul_(2)
backward(y.sum())
w = leaf(seed=2)
z = w * 1
r = call(torch.exp, z)
z.mul_(2)
backward(r.sum() + z.sum())
found = gradients(x, w)
""",
    "`data` of a result that is set": """
y = call(torch.sin, x)
y.data = torch.ones(3, 3, dtype=torch.float64)
backward((y * y).sum())
found = gradients(x)
""",
    "`set_checkpoint_early_stop`": """
from torch.utils.checkpoint import checkpoint as ck, set_checkpoint_early_stop
with set_checkpoint_early_stop(False):
    backward(ck(lambda b: call(torch.sin, b).exp(), x * 1., use_reentrant=False).sum())
found = gradients(x)
""",
    "`torch.profiler` and `record_function` around a pass": """
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
    with torch.profiler.record_function("pass"):
        backward(call(torch.sin, x).sum())
found = gradients(x)
""",
    "`scaled_dot_product_attention`": """
q = leaf(1, 1, 4, 8)
backward(call(nn.functional.scaled_dot_product_attention, q, q, q).sum())
found = gradients(q)
""",
    "`torch.jit.fork` and `wait` inside of a function that is called": """
def f(a):
    return torch.jit.wait(torch.jit.fork(torch.sin, a))
backward(call(f, x).sum())
found = gradients(x)
""",
    "`torch.cond` inside of one": """
def f(a):
    return torch.cond(a.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (a,))
backward(call(f, x).sum())
found = gradients(x)
""",
    "`torch.compile` inside of one": """
def f(a):
    return torch.compile(lambda b: b.sin() * 2, backend="eager")(a)
backward(call(f, x).sum())
found = gradients(x)
""",
    "compiled functions as arguments": """
def g(b):
    return b.sin() * 2
c = torch.compile(g, backend="eager")
def f(h, a):
    return h(a)
backward(call(f, c, x).sum())
found = gradients(x)
""",
    "`GradScaler.scale` of a loss": """
s = torch.amp.GradScaler("cpu", init_scale=4.0)
backward(s.scale(call(torch.sin, x).sum()))
found = gradients(x)
""",
    "`torch.distributions` that are sent, and their gradients": """
D = torch.distributions
def f(normal, a):
    transforms = [D.transforms.SigmoidTransform(), D.transforms.AffineTransform(a, 2.0)]
    return D.TransformedDistribution(normal, transforms)
d = call(f, D.Normal(x, x.exp()), x)
backward(d.log_prob(x.detach() + 0.5).nan_to_num(0).sum())
found = gradients(x)
""",
}
