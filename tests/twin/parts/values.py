"""Values of many types: dtypes, views, subclasses, in-place writes."""

from tests.twin.making import ANYWHERE, Maker, part

DTYPES = [
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
    "complex64",
    "complex128",
]


@part(ANYWHERE, common=True)
def dtypes(m: Maker) -> None:
    f = m.function("(a):\n    return [a, a + a, a[0]]")
    m.see(m.call(f, f"(draw({m.number()}) * 4).to(torch.{m.draw.choice(DTYPES)})"))


@part(ANYWHERE, common=True)
def shapes(m: Maker) -> None:
    f = m.function("(a):\n    return a, a.is_contiguous(), a.stride(), a.storage_offset() >= 0, a * 2")
    how = m.choose(
        "torch.tensor(3.0)",
        "torch.empty(0, 2)",
        f"draw({m.number()}).t()",
        f"draw({m.number()}, 8)[::2]",
        f"draw({m.number()}, 1, 3).expand(3, 3)",
        f"draw({m.number()}, 2, 3, 4).permute(2, 0, 1)",
        f"draw({m.number()}, 2, 3, 4, 5).to(memory_format=torch.channels_last)",
        f"draw({m.number()}, 200, 200)",
        f"torch.complex(draw({m.number()}), draw({m.number()})).conj()",
        f"torch._neg_view(draw({m.number()}))",
    )
    m.see(m.call(f, how))


@part(ANYWHERE, common=True)
def layouts(m: Maker) -> None:
    f = m.function("(a):\n    return a, a.to_dense() * 2")
    how = m.choose("to_sparse()", "to_sparse_csr()", "to_sparse_csc()")
    m.see(m.call(f, f"draw({m.number()}).relu().{how}"))


@part(ANYWHERE)
def views_of_one_memory(m: Maker) -> None:
    f, a = m.fresh("f"), m.fresh("a")
    m.define(f"def {f}(whole, row, column):\n    row.add_(1)\n    column.mul_(2)\n    return whole, row, column")
    m.line(f"{a} = draw({m.number()})")
    m.see(m.call(f, a, f"{a}[0]", f"{a}[:, 1]"))
    m.see(a)


@part(ANYWHERE, common=True)
def one_tensor_twice(m: Maker) -> None:
    f = m.function("(things):\n    return things[0] is things[1]['same'], things[0] * things[1]['same']")
    x = m.tensor()
    m.see(m.call(f, f"[{x}, {{'same': {x}}}]"))


@part(ANYWHERE, common=True)
def containers(m: Maker) -> None:
    cls = m.fresh("Pair")
    m.define(
        f"""class {cls}:
    def __init__(self, a, b):
        self.a, self.b = a, b

    def turned(self):
        return {cls}(self.b, self.a)"""
    )
    f = m.function("(pair, more):\n    return pair.turned(), more, [type(each).__name__ for each in more]")
    m.see(m.call(f, f"{cls}({m.tensor()}, 'b')", f"[{{1: {m.tensor()}}}, (2, None), b'x', {{3}}, 1j, 2**70, 'é']"))


@part(ANYWHERE)
def attributes_of_a_tensor(m: Maker) -> None:
    f, a = m.fresh("f"), m.fresh("a")
    m.define(f"def {f}(a):\n    return a, a.note, a * 2")
    m.line(f"{a} = draw({m.number()})")
    m.line(f"{a}.note = ['said', {m.number()}]")
    m.see(m.call(f, a))


@part(ANYWHERE)
def subclass_of_tensor(m: Maker) -> None:
    f, cls = m.fresh("f"), m.fresh("Marked")
    m.define(f"class {cls}(torch.Tensor):\n    def marked(self):\n        return self * 2")
    m.define(f"def {f}(a):\n    return a, isinstance(a, {cls}), a.marked(), a + 1")
    m.see(m.call(f, f"{m.tensor()}.detach().as_subclass({cls})"))


@part(ANYWHERE, common=True)
def parameters(m: Maker) -> None:
    f = m.function("(a):\n    return a, isinstance(a, nn.Parameter), a.requires_grad, (a * 2).sum()")
    m.see(m.call(f, f"nn.Parameter(draw({m.number()}), requires_grad={m.choose('True', 'False')})"))


@part(ANYWHERE, common=True)
def grad_modes(m: Maker) -> None:
    f = m.function(
        """(a):
    b = a * leaf(1)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), a.requires_grad, b, b.requires_grad"""
    )
    mode = m.choose("torch.no_grad()", "torch.inference_mode()", "torch.enable_grad()")
    m.line(f"with {mode}:\n    see('{f}', rpc.rpc_sync({m.worker()}, {f}, ({m.tensor()},)))")


@part(ANYWHERE)
def autocast(m: Maker) -> None:
    f = m.function("(a):\n    return a.float() @ a.float(), torch.is_autocast_enabled('cpu')")
    m.line(f"with torch.autocast('cpu', dtype=torch.bfloat16):\n    see('{f}', {m.call(f, m.tensor())})")


@part(ANYWHERE, common=True)
def leaves_that_are_sent(m: Maker) -> None:
    f = m.function("(a):\n    return a.requires_grad, a.is_leaf, a.grad")
    m.see(m.call(f, f"leaf({m.number()})"))


@part(ANYWHERE, common=True)
def local_backward(m: Maker) -> None:
    f = m.function(
        """(a):
    own = a.detach().clone().requires_grad_()
    (own * own).sum().backward()
    return own.grad, torch.autograd.grad((own ** 3).sum(), own)[0]"""
    )
    m.see(m.call(f, m.tensor()))
