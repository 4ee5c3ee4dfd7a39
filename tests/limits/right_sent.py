"""What is right as it is in one process: kinds of tensors, and what else torch has that can be sent.

Each program runs twice: in one process, and with its calls, modules and optimizers on another worker.
"""

from __future__ import annotations

RIGHT = {
    "values and gradients of `float8` and of half precision": """
t = torch.linspace(0.5, 3, 4)
found = []
kinds = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
for kind in [*kinds, torch.float16, torch.bfloat16, torch.complex32, torch.complex64]:
    leaf_of_kind = t.to(kind).requires_grad_()
    wide = torch.complex128 if kind.is_complex else torch.float64
    y = call(torch.Tensor.to, leaf_of_kind, wide)
    backward(y.abs().sum())
    found += [y, [each.to(wide) for each in gradients(leaf_of_kind)]]
""",
    "quantized tensors of 32 and of 4 bits, and their views": """
q = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 2, torch.qint32)
r = torch.quantize_per_channel(torch.randn(2, 4), torch.tensor([0.1, 0.2]), torch.tensor([1.0, 2.0]), 0, torch.quint4x2)
q, r = call(echo, (q.t(), r))
found = [q.int_repr(), q.stride(), r.int_repr(), str(r.qscheme())]
""",
    "jagged tensors of the same raggedness in one message, and with lengths": """
n = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
one, other = call(echo, (n, n * 2))
parts = torch.nested.narrow(torch.ones(2, 5), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged)
found = [(one + other).values(), list(call(echo, parts).unbind())]
""",
    "subclasses with `__torch_dispatch__`": """
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
""",
    "gradients of subclasses": """
class Sub(torch.Tensor):
    pass
t = leaf().detach().as_subclass(Sub).requires_grad_()
y = call(torch.sin, t)
backward(y.sum())
z = call(torch.sin, (x * 2).as_subclass(Sub))
backward(z.sum())
found = [type(y).__name__, *gradients(t, x)]
""",
    "tensors without dimensions or without elements": """
t = leaf()[0, 0].detach().requires_grad_()
e = torch.empty(0, 3, requires_grad=True)
backward(call(torch.sin, t) + call(torch.sin, e).sum())
strides = [call(torch.Tensor.stride, each) for each in (e.t(), torch.empty(2, 0, 3).permute(2, 0, 1))]
found = [*gradients(t, e), strides]
""",
    "sparse COO, mkldnn and meta leaves": """
coo = torch.eye(3, dtype=torch.float64).to_sparse().requires_grad_()
apart = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,)).requires_grad_()
mkldnn = torch.ones(3).to_mkldnn().requires_grad_()
meta = torch.empty(3, device="meta", requires_grad=True)
backward(call(torch.sparse.mm, coo, x).sum() + call(torch.Tensor.to_dense, apart).sum())
backward(call(torch.Tensor.to_dense, mkldnn).sum())
backward(call(torch.sin, meta).sum())
*dense, last = gradients(coo, apart, mkldnn, meta)
found = [[each.to_dense() for each in dense], last.device, last.shape]
""",
    "sparse and mkldnn results that lead to gradients": """
found = []
for convert in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr):
    backward(call(convert, x).to_dense().sum())
    backward(call(torch.Tensor.to_dense, convert(x * 2)).sum())
backward(call(torch.Tensor.to_dense, x.float().to_mkldnn()).sum())
found = gradients(x)
""",
    "batches and 32-bit indices of sparse CSR": """
pair = torch.stack([torch.eye(2), torch.eye(2)]).to_sparse_csr()
short = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
r = call(echo, torch.sparse_csr_tensor(*short, torch.ones(2), (2, 2)))
found = [call(echo, pair).to_dense(), r.to_dense(), r.crow_indices()]
""",
    "arguments and results that share memory, storages too": """
def f(a, b, storage):
    a.add_(1)
    storage[0] = 3
    return b, b.view(-1)[:2]
t = torch.ones(3)
one, other = call(f, t, t[1:], t.untyped_storage())
one.add_(1)
found = [one, other, list(call(echo, torch.ones(3).storage()))]
""",
    "tensors of no dimension that count as numbers in promotion": """
found = (torch.ones(2, dtype=torch.float16) + call(echo, torch.tensor(2.0))).dtype
""",
    "memory formats": """
found = [call(torch.Tensor.to, torch.ones(1, 2, 3, 3), memory_format=torch.channels_last).stride()]
found.append(call(torch.Tensor.stride, torch.ones(1, 2, 3, 3, 3).to(memory_format=torch.channels_last_3d)))
""",
    "scalars of numpy, arrays that share memory with tensors": """
import numpy
found = [call(echo, numpy.float32(1.5)).item(), call(numpy.asarray, torch.ones(3)).tolist()]
""",
    "enumerations of torch": """
found = [str(e) for e in call(echo, [torch.nn.attention.SDPBackend.MATH, torch.distributed.ReduceOp.SUM])]
""",
    "data sets and loaders, with worker processes too": """
from torch.utils.data import DataLoader, TensorDataset
def f(loader):
    apart = DataLoader(loader.dataset, batch_size=3, num_workers=1)
    return [list(loader), list(apart)]
found = call(f, DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2))
""",
    "state dicts that are sent, saved and loaded there": """
import io
def f(s):
    b = io.BytesIO()
    torch.save(s, b)
    b.seek(0)
    return torch.load(b)
found = call(f, nn.Linear(3, 3).double().state_dict())
""",
    "functions of `torch.func`, operators, and functions that were decorated": """
@torch.no_grad()
def f(a):
    return a.requires_grad, torch.is_grad_enabled()
functions = [torch.func.vmap(torch.sin), torch.func.grad(lambda a: a.sin().sum()), torch.ops.aten.sin.default]
found = [call(f, x), *[call(each, x.detach()) for each in functions]]
""",
    "`Function.apply`, and classes of functions": """
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a * 2
    @staticmethod
    def backward(ctx, g):
        return g * 3
def f(function, a):
    return function.apply(a)
backward(call(F.apply, x).sum() + call(f, F, x).sum())
found = gradients(x)
""",
    "objects of `no_grad`, `autocast` and profilers": """
def f(mode, also, profile):
    with mode, also:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), type(profile).__name__
found = call(f, torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.autograd.profiler.profile())
""",
    "weights that are packed for quantized operators, masks and biases of attention": """
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask
packed = torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(torch.ones(2, 2), 1.0, 0, torch.qint8), None)
mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 16, 16, device="cpu")
packed, mask, bias = call(echo, (packed, mask, causal_lower_right(4, 4)))
found = [torch.ops.quantized.linear_unpack(packed)[0].dequantize(), mask.to_dense(), type(bias).__name__]
""",
    "exceptions of torch": """
def f():
    raise torch.OutOfMemoryError("no memory")
found = []
for function, *args in ((f,), (torch.linalg.inv, torch.zeros(2, 2)), (torch.matmul, torch.ones(2), torch.ones(3))):
    try:
        call(function, *args)
    except RuntimeError as error:
        found.append(type(error).__name__)
""",
}
