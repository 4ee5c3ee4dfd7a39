"""What is right as it is in one process: tensors.

Each program runs twice: in one process, and with its calls, modules and optimizers on another worker.
"""

from __future__ import annotations

RIGHT = {
    "all data types that have values": """
kinds = sorted((each for each in vars(torch).values() if isinstance(each, torch.dtype)), key=str)
kinds = [each for each in dict.fromkeys(kinds) if not str(each).startswith(("torch.q", "torch.complex"))]
values = torch.arange(0, 256, 16, dtype=torch.uint8)
back = [call(echo, values.view(each)) for each in kinds]
found = [(str(each.dtype), each.view(torch.uint8)) for each in back]
found += [call(echo, torch.ones(2).to(each)) for each in (torch.complex64, torch.complex128)]
found.append(call(echo, torch.zeros(2, dtype=torch.complex32)).dtype)
""",
    "quantized tensors, by tensor": """
q = torch.quantize_per_tensor(torch.randn(4), 0.1, 2, torch.qint8)
r = call(echo, q)
found = [r.dequantize(), r.is_quantized, str(r.dtype), r.q_scale(), r.q_zero_point()]
""",
    "quantized tensors, by channel": """
q = torch.quantize_per_channel(torch.randn(2, 4), torch.tensor([0.1, 0.2]), torch.tensor([1, 2]), 0, torch.quint8)
r = call(echo, q)
found = [r.dequantize(), str(r.qscheme())]
""",
    "sparse COO, coalesced or not": """
s = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,))
r = call(echo, s)
found = [r.to_dense(), r.is_coalesced()]
""",
    "hybrid sparse tensors": """
s = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2, 3), (3, 3))
r = call(echo, s)
found = [r.to_dense(), r.dense_dim()]
""",
    "sparse CSR, CSC, BSR, BSC": """
r = [call(echo, torch.eye(4).to_sparse_bsr((2, 2))), call(echo, torch.eye(4).to_sparse_bsc((2, 2)))]
found = [[e.to_dense(), str(e.layout)] for e in r]
""",
    "gradients through sparse matrices": """
y = call(torch.sparse.mm, torch.eye(3, dtype=torch.float64).to_sparse_csr(), x)
backward(y.sum())
found = gradients(x)
""",
    "sparse gradients": """
w = leaf(5, 3)
y = call(nn.functional.embedding, torch.tensor([1, 1]), w, sparse=True)
backward(y.sum())
found = gradients(w)
""",
    "nested tensors without gradients": """
n = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
r = call(echo, n)
found = [list(r.unbind()), r.is_nested]
""",
    "jagged ones": """
n = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
r = call(echo, n)
found = [list(r.unbind()), r.is_nested]
""",
    "masked tensors": """
from torch.masked import masked_tensor
m = masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
r = call(echo, m)
found = [type(r).__name__, r.get_data(), r.get_mask()]
""",
    "meta tensors": 'found = call(echo, torch.empty(3, device="meta")).device',
    "mkldnn tensors": """
r = call(echo, torch.ones(3).to_mkldnn())
found = [r.to_dense(), r.is_mkldnn]
""",
    "conjugated views": """
z = torch.complex(x.detach(), x.detach())
found = [call(torch.Tensor.is_conj, z.conj()), call(echo, z.conj()).is_conj(), call(echo, z.conj())]
""",
    "negated views": """
z = torch.complex(x.detach(), x.detach()).conj().imag
found = [z.is_neg(), call(torch.Tensor.is_neg, z), call(echo, z)]
""",
    "expanded tensors": """
e = torch.ones(1, 3).expand(1000000, 3)
r = call(torch.Tensor.stride, e)
found = [r, call(echo, torch.ones(3, 1).expand(3, 3)).stride()]
""",
    "writes to what was expanded": """
def f(t):
    t[0] = 2
    return t
found = call(f, torch.ones(1, 3).expand(2, 3))
""",
    "strides of views": """
t = torch.arange(24.).reshape(2, 3, 4)
views = [t.transpose(0, 2), t[:, 1], t[..., ::2], t.permute(2, 0, 1), t.unfold(2, 2, 1), t.flip(0)]
views += [t.narrow(1, 1, 2), t.diagonal(0, 0, 1), t.as_strided((2, 2), (1, 5), 3)]
found = [call(torch.Tensor.stride, view) for view in views]
""",
    "overlapping views": """
t = torch.arange(6.).unfold(0, 3, 1)
found = call(echo, t)
""",
    "storages": """
s = torch.ones(3).untyped_storage()
found = list(call(echo, s))
""",
    "subclasses with attributes": """
class Sub(torch.Tensor):
    pass
t = torch.ones(3).as_subclass(Sub)
t.note = 1
r = call(echo, t)
found = [type(r).__name__, r.note]
""",
    "`nn.Buffer`, `nn.Parameter`, and their attributes": """
b = nn.Buffer(torch.ones(3))
r = call(echo, b)
found = type(r).__name__
""",
    "gradients of complex numbers": """
z = torch.complex(leaf(), leaf(seed=2)).detach().requires_grad_()
backward(call(torch.mul, z, z).abs().sum())
found = gradients(z)
""",
    "tensors of zeros without memory": "found = call(echo, torch._efficientzerotensor(3))",
    "generators": """
g = torch.Generator().manual_seed(3)
def f(g):
    return torch.rand(3, generator=g)
found = call(f, g)
""",
    "devices, data types, layouts, sizes": """
kinds = [torch.strided, torch.channels_last, torch.per_tensor_affine]
found = call(echo, [torch.device("cpu"), torch.float16, torch.Size([1]), *kinds])
""",
    "named results of operators": """
r = call(torch.max, x.detach(), 0)
found = [type(r).__name__, r.values]
""",
    "operators with several results": """
backward(call(torch.linalg.svd, x)[1].sum())
found = gradients(x)
""",
    "arrays of numpy, structured ones too": """
import numpy
found = str(call(echo, numpy.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])))
""",
    "large tensors": "found = call(torch.sum, torch.ones(3000000))",
}
