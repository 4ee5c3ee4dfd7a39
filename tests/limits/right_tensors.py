"""Uses of optimizers and tensors that give the same as in one process.

Each program runs twice: in one process, and with its calls, modules and optimizers on another worker.
"""

RIGHT = {
    "Optimizers": """
## `foreach`, `maximize`, `nesterov`, `weight_decay`
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
options = {"maximize": True, "foreach": True, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True}
optimizer = Opt(torch.optim.SGD, layer, lr=0.1, **options)
found = stepped(layer, optimizer)
## a tensor as learning rate
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.SGD, layer, lr=torch.tensor(0.1))
stepped(layer, optimizer)
optimizer.own.param_groups[0]["lr"].mul_(0.5)
found = layer.state_dict()
## optimizers of one's own
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * g["lr"])
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(Own, layer, lr=0.1)
found = stepped(layer, optimizer)
## a compiled step
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
backward(layer(x).sum())
torch.compile(optimizer.step, backend="eager")()
found = layer.state_dict()
## hooks before and after the step
seen = []
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
optimizer.own.register_step_pre_hook(lambda *a: seen.append("pre") and None)
optimizer.own.register_step_post_hook(lambda *a: seen.append("post") and None)
stepped(layer, optimizer)
found = seen
## `get_total_norm` of gradients of the context
layer = nn.Linear(3, 3).double()
backward(call(torch.sin, layer(x)).sum())
found = nn.utils.get_total_norm([g for g in gradients(*layer.parameters())])
## `GradScaler` inside of a function that is called
def f(a):
    s = torch.amp.GradScaler("cpu")
    torch.manual_seed(0)
    m = nn.Linear(3, 3).double()
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    s.scale(m(a.detach()).sum()).backward()
    s.step(o)
    s.update()
    return m.state_dict()
found = call(f, x)
## options that are set in `param_groups`
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
for group in optimizer.own.param_groups:
    group["lr"], group["weight_decay"] = 0.5, 0.1
found = stepped(layer, optimizer)
## schedules of a learning rate that is a tensor
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.SGD, layer, lr=torch.tensor(0.1, dtype=torch.float64))
s = torch.optim.lr_scheduler.ExponentialLR(optimizer.own, 0.5)
s.step()
found = [stepped(layer, optimizer), float(optimizer.own.param_groups[0]["lr"])]
## warnings of schedulers that step before their optimizer
import warnings
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
with warnings.catch_warnings(record=True) as w:
    warnings.simplefilter("always")
    s = torch.optim.lr_scheduler.StepLR(optimizer.own, 1)
    s.step()
found = [str(e.message)[:40] for e in w]
## optimizers that are sent with their states
m = nn.Linear(3, 3).double()
optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
m(x.detach()).sum().backward()
optimizer.step()
def f(opt):
    return opt.state_dict()["param_groups"][0]["lr"], [state["momentum_buffer"] for state in opt.state.values()]
found = call(f, optimizer)
## `ZeroRedundancyOptimizer`, `PostLocalSGDOptimizer`, in classes that take parameters alone
one_process()

from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
class Zero(ZeroRedundancyOptimizer):
    def __init__(self, params, lr):
        super().__init__(params, torch.optim.Adam, lr=lr)
class PostLocal(PostLocalSGDOptimizer):
    def __init__(self, params, lr):
        averager = PeriodicModelAverager(period=1, process_group=dist.group.WORLD)
        super().__init__(torch.optim.SGD(params, lr), averager)
found = []
for kind in (Zero, PostLocal):
    layer = made(nn.Linear, 3, 3, dtype=torch.float64)
    optimizer = Opt(kind, layer, lr=0.1)
    found.append(stepped(layer, optimizer))
""",
    "Tensors": """
## all data types that have values
kinds = sorted((each for each in vars(torch).values() if isinstance(each, torch.dtype)), key=str)
kinds = [each for each in dict.fromkeys(kinds) if not str(each).startswith(("torch.q", "torch.complex"))]
values = torch.arange(0, 256, 16, dtype=torch.uint8)
back = [call(echo, values.view(each)) for each in kinds]
found = [(str(each.dtype), each.view(torch.uint8)) for each in back]
found += [call(echo, torch.ones(2).to(each)) for each in (torch.complex64, torch.complex128)]
found.append(call(echo, torch.zeros(2, dtype=torch.complex32)).dtype)
## quantized tensors, by tensor
q = torch.quantize_per_tensor(torch.randn(4), 0.1, 2, torch.qint8)
r = call(echo, q)
found = [r.dequantize(), r.is_quantized, str(r.dtype), r.q_scale(), r.q_zero_point()]
## quantized tensors, by channel
q = torch.quantize_per_channel(torch.randn(2, 4), torch.tensor([0.1, 0.2]), torch.tensor([1, 2]), 0, torch.quint8)
r = call(echo, q)
found = [r.dequantize(), str(r.qscheme())]
## sparse COO, coalesced or not
s = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,))
r = call(echo, s)
found = [r.to_dense(), r.is_coalesced()]
## hybrid sparse tensors
s = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2, 3), (3, 3))
r = call(echo, s)
found = [r.to_dense(), r.dense_dim()]
## sparse CSR, CSC, BSR, BSC
r = [call(echo, torch.eye(4).to_sparse_bsr((2, 2))), call(echo, torch.eye(4).to_sparse_bsc((2, 2)))]
found = [[e.to_dense(), str(e.layout)] for e in r]
## gradients through sparse matrices
found = gradients_of(call(torch.sparse.mm, torch.eye(3, dtype=torch.float64).to_sparse_csr(), x), x)
## sparse gradients
w = leaf(5, 3)
found = gradients_of(call(nn.functional.embedding, torch.tensor([1, 1]), w, sparse=True), w)
## nested tensors without gradients
n = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
r = call(echo, n)
found = [list(r.unbind()), r.is_nested]
## jagged ones
n = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
r = call(echo, n)
found = [list(r.unbind()), r.is_nested]
## masked tensors
from torch.masked import masked_tensor
m = masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
r = call(echo, m)
found = [type(r).__name__, r.get_data(), r.get_mask()]
## meta tensors
found = call(echo, torch.empty(3, device="meta")).device
## mkldnn tensors
r = call(echo, torch.ones(3).to_mkldnn())
found = [r.to_dense(), r.is_mkldnn]
## conjugated views
z = torch.complex(x.detach(), x.detach())
found = [call(torch.Tensor.is_conj, z.conj()), call(echo, z.conj()).is_conj(), call(echo, z.conj())]
## negated views
z = torch.complex(x.detach(), x.detach()).conj().imag
found = [z.is_neg(), call(torch.Tensor.is_neg, z), call(echo, z)]
## expanded tensors
e = torch.ones(1, 3).expand(1000000, 3)
r = call(torch.Tensor.stride, e)
found = [r, call(echo, torch.ones(3, 1).expand(3, 3)).stride()]
## writes to what was expanded
def f(t):
    t[0] = 2
    return t
found = call(f, torch.ones(1, 3).expand(2, 3))
## strides of views
t = torch.arange(24.).reshape(2, 3, 4)
views = [t.transpose(0, 2), t[:, 1], t[..., ::2], t.permute(2, 0, 1), t.unfold(2, 2, 1), t.flip(0)]
views += [t.narrow(1, 1, 2), t.diagonal(0, 0, 1), t.as_strided((2, 2), (1, 5), 3)]
found = [call(torch.Tensor.stride, view) for view in views]
## overlapping views
t = torch.arange(6.).unfold(0, 3, 1)
found = call(echo, t)
## storages
s = torch.ones(3).untyped_storage()
found = list(call(echo, s))
## subclasses with attributes
class Sub(torch.Tensor):
    pass
t = torch.ones(3).as_subclass(Sub)
t.note = 1
r = call(echo, t)
found = [type(r).__name__, r.note]
## `nn.Buffer`, `nn.Parameter`, and their attributes
b = nn.Buffer(torch.ones(3))
r = call(echo, b)
found = type(r).__name__
## gradients of complex numbers
z = torch.complex(leaf(), leaf(seed=2)).detach().requires_grad_()
found = gradients_of(call(torch.mul, z, z).abs(), z)
## tensors of zeros without memory
found = call(echo, torch._efficientzerotensor(3))
## generators
g = torch.Generator().manual_seed(3)
def f(g):
    return torch.rand(3, generator=g)
found = call(f, g)
## devices, data types, layouts, sizes
kinds = [torch.strided, torch.channels_last, torch.per_tensor_affine]
found = call(echo, [torch.device("cpu"), torch.float16, torch.Size([1]), *kinds])
## named results of operators
r = call(torch.max, x.detach(), 0)
found = [type(r).__name__, r.values]
## operators with several results
found = gradients_of(call(torch.linalg.svd, x)[1], x)
## arrays of numpy, structured ones too
import numpy
found = str(call(echo, numpy.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])))
## large tensors
found = call(torch.sum, torch.ones(3000000))
## values and gradients of `float8` and of half precision
t = torch.linspace(0.5, 3, 4)
found = []
kinds = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
for kind in [*kinds, torch.float16, torch.bfloat16, torch.complex32, torch.complex64]:
    leaf_of_kind = t.to(kind).requires_grad_()
    wide = torch.complex128 if kind.is_complex else torch.float64
    y = call(torch.Tensor.to, leaf_of_kind, wide)
    backward(y.abs().sum())
    found += [y, [each.to(wide) for each in gradients(leaf_of_kind)]]
## quantized tensors of 32 and of 4 bits, and their views
q = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 2, torch.qint32)
r = torch.quantize_per_channel(torch.randn(2, 4), torch.tensor([0.1, 0.2]), torch.tensor([1.0, 2.0]), 0, torch.quint4x2)
q, r = call(echo, (q.t(), r))
found = [q.int_repr(), q.stride(), r.int_repr(), str(r.qscheme())]
## jagged tensors of the same raggedness in one message, and with lengths
n = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
one, other = call(echo, (n, n * 2))
parts = torch.nested.narrow(torch.ones(2, 5), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged)
found = [(one + other).values(), list(call(echo, parts).unbind())]
## subclasses with `__torch_dispatch__`
class W(torch.Tensor):
    @staticmethod
    def __new__(cls, a):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)
    def __init__(self, a):
        self.a = a
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*[e.a if isinstance(e, W) else e for e in args], **(kwargs or {}))
r = call(echo, W(torch.ones(3)))
found = [type(r).__name__, r.a]
## gradients of subclasses
class Sub(torch.Tensor):
    pass
t = leaf().detach().as_subclass(Sub).requires_grad_()
y = call(torch.sin, t)
backward(y.sum())
z = call(torch.sin, (x * 2).as_subclass(Sub))
found = [type(y).__name__, *gradients_of(z, t, x)]
## tensors without dimensions or without elements
t = leaf()[0, 0].detach().requires_grad_()
e = torch.empty(0, 3, requires_grad=True)
backward(call(torch.sin, t) + call(torch.sin, e).sum())
strides = [call(torch.Tensor.stride, each) for each in (e.t(), torch.empty(2, 0, 3).permute(2, 0, 1))]
found = [*gradients(t, e), strides]
## sparse COO, mkldnn and meta leaves
coo = torch.eye(3, dtype=torch.float64).to_sparse().requires_grad_()
apart = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,)).requires_grad_()
mkldnn = torch.ones(3).to_mkldnn().requires_grad_()
meta = torch.empty(3, device="meta", requires_grad=True)
backward(call(torch.sparse.mm, coo, x).sum() + call(torch.Tensor.to_dense, apart).sum())
backward(call(torch.Tensor.to_dense, mkldnn).sum())
backward(call(torch.sin, meta).sum())
*dense, last = gradients(coo, apart, mkldnn, meta)
found = [[each.to_dense() for each in dense], last.device, last.shape]
## sparse and mkldnn results that lead to gradients
found = []
for convert in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr):
    backward(call(convert, x).to_dense().sum())
    backward(call(torch.Tensor.to_dense, convert(x * 2)).sum())
found = gradients_of(call(torch.Tensor.to_dense, x.float().to_mkldnn()), x)
## batches and 32-bit indices of sparse CSR
pair = torch.stack([torch.eye(2), torch.eye(2)]).to_sparse_csr()
short = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
r = call(echo, torch.sparse_csr_tensor(*short, torch.ones(2), (2, 2)))
found = [call(echo, pair).to_dense(), r.to_dense(), r.crow_indices()]
## arguments and results that share memory, storages too
def f(a, b, storage):
    a.add_(1)
    storage[0] = 3
    return b, b.view(-1)[:2]
t = torch.ones(3)
one, other = call(f, t, t[1:], t.untyped_storage())
one.add_(1)
found = [one, other, list(call(echo, torch.ones(3).storage()))]
## tensors of no dimension that count as numbers in promotion
found = (torch.ones(2, dtype=torch.float16) + call(echo, torch.tensor(2.0))).dtype
## memory formats
found = [call(torch.Tensor.to, torch.ones(1, 2, 3, 3), memory_format=torch.channels_last).stride()]
found.append(call(torch.Tensor.stride, torch.ones(1, 2, 3, 3, 3).to(memory_format=torch.channels_last_3d)))
## scalars of numpy, arrays that are made of tensors
import numpy
found = [call(echo, numpy.float32(1.5)).item(), call(numpy.asarray, torch.ones(3)).tolist()]
## enumerations of torch
found = [str(e) for e in call(echo, [torch.nn.attention.SDPBackend.MATH, torch.distributed.ReduceOp.SUM])]
## data sets and loaders, with worker processes too
from torch.utils.data import DataLoader, TensorDataset
def f(loader):
    apart = DataLoader(loader.dataset, batch_size=3, num_workers=1)
    return [list(loader), list(apart)]
found = call(f, DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2))
## state dicts that are sent, saved and loaded there
import io
def f(s):
    b = io.BytesIO()
    torch.save(s, b)
    b.seek(0)
    return torch.load(b)
found = call(f, nn.Linear(3, 3).double().state_dict())
## functions of `torch.func`, operators, and functions that were decorated
@torch.no_grad()
def f(a):
    return a.requires_grad, torch.is_grad_enabled()
functions = [torch.func.vmap(torch.sin), torch.func.grad(lambda a: a.sin().sum()), torch.ops.aten.sin.default]
found = [call(f, x), *[call(each, x.detach()) for each in functions]]
## `Function.apply`, and classes of functions
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a * 2
    @staticmethod
    def backward(ctx, g):
        return g * 3
def f(function, a):
    return function.apply(a)
found = gradients_of(call(F.apply, x) + call(f, F, x), x)
## objects of `no_grad`, `autocast` and profilers
def f(mode, also, profile):
    with mode, also:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), type(profile).__name__
found = call(f, torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.autograd.profiler.profile())
## weights that are packed for quantized operators, masks and biases of attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask
packed = torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(torch.ones(2, 2), 1.0, 0, torch.qint8), None)
mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 16, 16, device="cpu")
packed, mask, bias = call(echo, (packed, mask, causal_lower_right(4, 4)))
found = [torch.ops.quantized.linear_unpack(packed)[0].dequantize(), mask.to_dense(), type(bias).__name__]
## exceptions of torch
def f():
    raise torch.OutOfMemoryError("no memory")
found = []
for function, *args in ((f,), (torch.linalg.inv, torch.zeros(2, 2)), (torch.matmul, torch.ones(2), torch.ones(3))):
    try:
        call(function, *args)
    except RuntimeError as error:
        found.append(type(error).__name__)
## `DTensor` and `DeviceMesh`
one_process()

from torch.distributed.tensor import distribute_tensor, Shard, init_device_mesh
mesh = init_device_mesh("cpu", (1,))
d = distribute_tensor(torch.ones(3, 3), mesh, [Shard(0)])
r = call(echo, d)
found = [type(r).__name__, r.to_local(), str(r.placements), str(call(echo, mesh))]
""",
}
