"""Uses of autograd that give the same as in one process.

Each program runs twice: in one process, and with its calls, modules and optimizers on another worker.
"""

RIGHT = {
    "Autograd": """
## `torch.autograd.grad` and `backward(inputs=...)` of what stays on one worker
y = x.sin().sum()
found = torch.autograd.grad(y, x)
## `telegrad.autograd.grad`
found = grad(call(torch.sin, x).sum(), x)
## `torch.autograd.functional` inside of a function that is called
def jac(a):
    return torch.autograd.functional.jacobian(torch.sin, a, create_graph=True)
found = gradients_of(call(jac, x), x)
## `torch.autograd.forward_ad` inside of such a function
def f(a):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(torch.autograd.forward_ad.make_dual(a, a).sin()).tangent
found = through(f, x)
## `torch.func` inside of one: `vmap`, `grad`, `jacrev`, `jacfwd`, `hessian`, `vjp`, `functionalize`
def f(a):
    t = torch.func
    g = lambda r: r.sin().sum()
    of_rows = [t.jacrev(torch.sin), t.jacfwd(torch.sin), t.hessian(g)]
    of_all = [t.vmap(torch.sin), t.grad(g), t.functionalize(torch.sin), t.vjp(torch.sin, a)[1]]
    return sum(f(a).sum((2, 3)) for f in of_rows) + sum(f(a) for f in of_all[:-1]) + of_all[-1](a)[0]
found = through(f, x)
## `torch.func.functional_call` of a module that makes remote calls
net = nn.Linear(3, 3, dtype=torch.float64)
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(leaf().detach())
    def forward(self, a):
        return call(torch.mul, a, self.w)
w = leaf(seed=7)
found = gradients_of(torch.func.functional_call(M(), {"w": w}, (x,)), w, x)
## `saved_tensors_hooks`, `save_on_cpu` and `disable_saved_tensors_hooks` inside of one
def f(a):
    with torch.autograd.graph.save_on_cpu():
        return (a * a).sin()
found = through(f, x)
## `detect_anomaly` inside of one
def f(a):
    with torch.autograd.detect_anomaly(check_nan=True):
        return (a * a).sin()
found = through(f, x)
## `checkpoint_sequential`
def f(a):
    from torch.utils.checkpoint import checkpoint_sequential
    net = nn.Sequential(nn.Tanh(), nn.Softplus(), nn.Tanh(), nn.Tanh())
    return checkpoint_sequential(net, 2, a, use_reentrant=False)
found = through(f, x)
## reentrant checkpoints inside of one
def f(a):
    from torch.utils.checkpoint import checkpoint_sequential
    net = nn.Sequential(nn.Tanh(), nn.Softplus(), nn.Tanh(), nn.Tanh())
    return checkpoint_sequential(net, 2, a, use_reentrant=True)
found = through(f, x)
## selective activation checkpoints
def f(a):
    import functools
    from torch.utils.checkpoint import checkpoint as ck, create_selective_checkpoint_contexts
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return ck(lambda b: (b @ b).sin().tanh(), a, use_reentrant=False, context_fn=contexts)
found = through(f, x)
## checkpoints, also nested, with `use_reentrant=False` around a remote call
from torch.utils.checkpoint import checkpoint as ck
def inner(b):
    return ck(lambda c: call(torch.sin, c).exp(), b, use_reentrant=False).tanh()
found = gradients_of(ck(inner, x * 1.0, use_reentrant=False), x)
## random numbers that are drawn again inside of these
from torch.utils.checkpoint import checkpoint as ck
backward(ck(lambda b: call(torch.sin, nn.functional.dropout(b, 0.5)).tanh(), x * 1.0, use_reentrant=False).sum())
found = gradients(x)
## a `Function` with `jvp` and `generate_vmap_rule`
class F(Sine):
    generate_vmap_rule = True
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
    @staticmethod
    def jvp(ctx, t):
        return t * ctx.saved_tensors[0].cos()
def f(a):
    of_rows = torch.func.vmap(torch.func.grad(lambda row: F.apply(row).sum()))(a)
    return torch.func.vmap(F.apply)(a) + torch.func.jvp(F.apply, (a,), (a,))[1] + of_rows
found = through(f, x)
## a `Function` with a `vmap` of its own
class F(Sine):
    @staticmethod
    def vmap(info, in_dims, a):
        return F.apply(a), in_dims[0]
def f(a):
    return torch.func.vmap(F.apply)(a)
found = through(f, x)
## `once_differentiable`
class F(Sine):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()
found = through(F.apply, x)
## a `Function` whose forward and backward make remote calls
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return call(torch.sin, a)
    @staticmethod
    def backward(ctx, g):
        return g * call(torch.cos, ctx.saved_tensors[0])
found = gradients_of(F.apply(x * 1), x)
## `needs_input_grad`
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return a * b
    @staticmethod
    def backward(ctx, g):
        return (g if ctx.needs_input_grad[0] else None), (g * 2 if ctx.needs_input_grad[1] else None)
b = leaf(seed=3).detach()
found = through(F.apply, x, b)
## hooks that make remote calls
x.register_hook(lambda g: call(torch.mul, g, 2))
found = through(torch.sin, x)
## `no_grad`, `enable_grad`, `set_grad_enabled`, `inference_mode`
def f(a):
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), a.requires_grad, (a * 1).is_inference()
found = [call(f, x)]
with torch.no_grad():
    found.append(call(f, x))
    with torch.enable_grad():
        found.append(call(f, x))
with torch.set_grad_enabled(False):
    found.append(call(f, x))
with torch.inference_mode():
    found.append(call(f, x))
    with torch.inference_mode(False):
        found.append(call(f, x))
## `detach`, `detach_`
def f(a):
    b = a * 2
    return b.detach_() + a
found = through(f, x)
## `requires_grad_` of what was received
y = call(torch.sin, x.detach())
y.requires_grad_()
found = gradients_of(y * y, y)
## `retain_grad`
y = call(torch.sin, x)
y.retain_grad()
backward((y * y).sum())
found = [y.grad, *gradients(x)]
## hooks that are removed
y = call(torch.sin, x)
h = y.register_hook(lambda g: g * 2)
h.remove()
found = gradients_of(y, x)
## `register_multi_grad_hook` with `mode="any"`
a, b = leaf(seed=5), leaf(seed=6)
seen = []
torch.autograd.graph.register_multi_grad_hook([a, b], lambda g: seen.append(1), mode="any")
backward((call(torch.mul, a, b)).sum())
found = seen
## `register_post_accumulate_grad_hook`
seen = []
x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
backward(call(torch.sin, x).sum())
found = seen
## several passes in one context
backward(call(torch.sin, x).sum())
found = through(torch.cos, x)
## `retain_graph`
y = call(torch.sin, x).sum()
backward(y, retain_graph=True)
backward(y)
found = gradients(x)
## `create_graph`
y = call(torch.sin, x).sum()
backward(y, create_graph=True)
found = [g.detach() for g in gradients(x)]
## gradients that are no numbers
found = gradients_of(call(torch.sqrt, x * 0), x)
## views of every kind, as `as_strided`
def f(a):
    v = a.as_strided((2, 2), (1, 3))
    return v.sin()
found = gradients_of(call(f, x * 1), x)
## `torch.autocast`
def f(a):
    return a @ a
with torch.autocast("cpu", dtype=torch.bfloat16):
    y = call(f, x.float())
    backward(y.float().sum())
found = [y, *gradients(x)]
## regions without autocast inside of it
def f(a):
    with torch.autocast("cpu", enabled=False):
        return a @ a
with torch.autocast("cpu", dtype=torch.bfloat16):
    y = call(f, x.float())
found = [y, *gradients_of(y.float(), x)]
## `backward` inside of `torch.autocast`, which holds for what runs on other workers
y = call(torch.matmul, x.float(), x.float())
with torch.autocast("cpu", dtype=torch.bfloat16):
    backward(y.sum())
found = gradients(x)
## `custom_fwd` and `custom_bwd`
class F(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a @ a
    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        return g @ a.t() + a.t() @ g
with torch.autocast("cpu", dtype=torch.bfloat16):
    y = call(F.apply, x.float())
    backward(y.float().sum())
found = [y, *gradients(x)]
## `torch.jit.trace` inside of a function that is called
def f(a):
    return torch.jit.trace(lambda a: a.sin() + a, (torch.ones(3, 3),), check_trace=False)(a)
found = through(f, x)
## `torch.compile` of a function that makes remote calls
f = torch.compile(lambda a: call(torch.sin, a * 2).tanh(), backend="eager")
found = gradients_of(f(x), x)
## a `TorchFunctionMode` around a call
from torch.overrides import TorchFunctionMode
class Twice(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
with Twice():
    backward(call(torch.sin, x).sum())
found = gradients(x)
## `backward` inside of `no_grad`
y = call(torch.sin, x).sum()
with torch.no_grad():
    backward(y)
found = gradients(x)
## hooks of the nodes of a graph
seen = []
y = call(torch.sin, x * 2)
y.grad_fn.register_hook(lambda gi, go: seen.append(go[0].clone()))
y.grad_fn.register_prehook(lambda go: (go[0] * 2,))
backward(y.sum())
found = [seen, *gradients(x)]
## hooks of the node that adds up the gradient of a leaf
seen = []
weight = nn.Parameter(leaf(seed=4).detach())
node = torch.autograd.graph.get_gradient_edge(weight).node
node.register_hook(lambda given, taken: seen.append((taken, weight.grad.clone())))
node.register_prehook(lambda gradients: (gradients[0] * 2,))
backward(call(torch.mul, weight, x).sum() + (weight * 3).sum())
found = [seen, *gradients(x, weight)]
## optimizers that step in such hooks
from torch.distributed.optim import _apply_optimizer_in_backward
layer = nn.Linear(3, 3).double()
_apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.1})
backward(call(torch.sin, layer(x)).sum())
found = layer.state_dict()
## hooks of what was received
def f(a):
    a.register_hook(lambda g: g * 3)
    return a * 2
found = through(f, x)
## `grad` of a `grad` with `create_graph`
y = call(torch.sin, x).sum()
g, = grad(y, [x], create_graph=True)
h, = grad(g.sum(), [x])
found = h
## second derivatives of a `Function`
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a ** 3
    @staticmethod
    def backward(ctx, g):
        return g * 3 * ctx.saved_tensors[0] ** 2
y = call(F.apply, x).sum()
g, = grad(y, [x], create_graph=True)
found = gradients_of(g, x)
## `torch.autograd.grad` inside of a function that is called, of what it received
def f(a):
    return torch.autograd.grad(a.sin().sum(), a, create_graph=True)[0]
found = through(f, x)
## `mark_dirty`
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        a.add_(1)
        ctx.mark_dirty(a)
        return a
    @staticmethod
    def backward(ctx, g):
        return g * 2
found = gradients_of(call(F.apply, x * 1), x)
## `mark_non_differentiable`
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
y, b, c = call(F.apply, x)
found = [b, c, *gradients_of(y, x)]
## `set_materialize_grads`
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.set_materialize_grads(False)
        return a * 2, a * 3
    @staticmethod
    def backward(ctx, g, h):
        assert h is None
        return g * 2
y, b = call(F.apply, x)
found = gradients_of(y, x)
## `clear_saved_tensors_on_access`
class F(Sine):
    clear_saved_tensors_on_access = True
found = through(F.apply, x)
## `torch.library.custom_op` with `register_autograd`
@torch.library.custom_op("telegrad_limits::twice", mutates_args=())
def twice(a: torch.Tensor) -> torch.Tensor:
    return a * 2
twice.register_autograd(lambda ctx, g: g * 2)
def f(a):
    return torch.ops.telegrad_limits.twice(a)
found = through(f, x)
## `allow_mutation_on_saved_tensors`
with torch.autograd.graph.allow_mutation_on_saved_tensors():
    y = x * 2
    z = call(torch.sin, y) + y.sin()
    y.add_(1)
    backward(z.sum())
found = gradients(x)
## `set_multithreading_enabled`
with torch.autograd.set_multithreading_enabled(False):
    found = through(torch.sin, x)
## anomaly mode around a pass
y = call(torch.sqrt, x * 0 - 1)
try:
    with torch.autograd.detect_anomaly():
        backward(y.sum())
    found = "no error"
except RuntimeError as e:
    found = type(e).__name__
## a pass inside of `with torch.device(...)`
with torch.device("meta"):
    y = call(torch.sin, x)
    backward(y.sum())
found = gradients(x)
## writes in place to results, and to what was sent
y = call(torch.sin, x)
y.mul_(2)
backward(y.sum())
w = leaf(seed=2)
z = w * 1
r = call(torch.exp, z)
z.mul_(2)
found = gradients_of(r.sum() + z.sum(), x, w)
## `data` of a result that is set
y = call(torch.sin, x)
y.data = torch.ones(3, 3, dtype=torch.float64)
found = gradients_of(y * y, x)
## `set_checkpoint_early_stop`
from torch.utils.checkpoint import checkpoint as ck, set_checkpoint_early_stop
with set_checkpoint_early_stop(False):
    found = gradients_of(ck(lambda b: call(torch.sin, b).exp(), x * 1., use_reentrant=False), x)
## `torch.profiler` and `record_function` around a pass
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
    with torch.profiler.record_function("pass"):
        found = through(torch.sin, x)
## `scaled_dot_product_attention`
q = leaf(1, 1, 4, 8)
found = gradients_of(call(nn.functional.scaled_dot_product_attention, q, q, q), q)
## `torch.jit.fork` and `wait` inside of a function that is called
def f(a):
    return torch.jit.wait(torch.jit.fork(torch.sin, a))
found = through(f, x)
## `torch.cond` inside of one
def f(a):
    return torch.cond(a.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (a,))
found = through(f, x)
## `torch.compile` inside of one
def f(a):
    return torch.compile(lambda b: b.sin() * 2, backend="eager")(a)
found = through(f, x)
## compiled functions as arguments
def g(b):
    return b.sin() * 2
c = torch.compile(g, backend="eager")
found = gradients_of(call(apply, c, x), x)
## `GradScaler.scale` of a loss
s = torch.amp.GradScaler("cpu", init_scale=4.0)
backward(s.scale(call(torch.sin, x).sum()))
found = gradients(x)
## `torch.distributions` that are sent, and their gradients
D = torch.distributions
def f(normal, a):
    transforms = [D.transforms.SigmoidTransform(), D.transforms.AffineTransform(a, 2.0)]
    return D.TransformedDistribution(normal, transforms)
d = call(f, D.Normal(x, x.exp()), x)
found = gradients_of(d.log_prob(x.detach() + 0.5).nan_to_num(0), x)
"""
}
