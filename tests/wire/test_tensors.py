"""Tensors arrive as they were sent, and only their used memory is sent."""

import copy
import ctypes
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from telegrad import errors
from telegrad._core.wire.packing import ROOM, SMALL, pack, unpack
from telegrad._core.wire.tensors import memory
from tests.cluster import PATIENCE


def journey(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Pack the tensors, copy their blobs as a transport does, and unpack them."""
    meta, blobs, _ = pack(tensors)
    assert all(blob.dtype == torch.uint8 and blob.dim() == 1 and blob.is_contiguous() for blob in blobs)
    return unpack(meta, [blob.clone() for blob in blobs])


def carried(*tensors: torch.Tensor) -> int:
    meta, blobs, _ = pack(tensors)
    return len(meta) + sum(blob.numel() for blob in blobs)


QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - QUANTIZED, key=str)


@pytest.mark.parametrize("size", [5, 50_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, size: int) -> None:
    source = torch.empty(size * dtype.itemsize, dtype=torch.uint8).random_(0, 2)
    tensor = torch.empty(0, dtype=dtype).set_(source.untyped_storage(), 0, (size,), (1,))
    for made in (tensor, torch.empty(0, dtype=dtype).set_(source.untyped_storage(), 0, (size // 2,), (2,))):
        (back,) = journey(made)
        assert (back.dtype, back.stride()) == (dtype, made.stride())
        data = torch.empty(0, dtype=torch.uint8).set_(back.untyped_storage()).numpy().tobytes()
        assert data == source.numpy().tobytes()[: len(data)]
        assert len(data) >= dtype.itemsize * (2 * made.numel() - 1 if made is not tensor else size)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.empty(0, 3).t(),
        torch.empty(2, 0, 3).permute(2, 0, 1),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(100_000.0).view(100, 1000).t(),
        torch.ones(4).expand(3, 4),
        torch.tensor(1.0).expand(1000, 1000),
        torch.arange(20.0)[3:9],
        torch.arange(100_000.0)[7:99_000],
        torch.complex(torch.ones(3), torch.ones(3)).conj(),
        torch.complex(torch.ones(3), torch.ones(3)).conj().imag,
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 2,
        torch.ones(3, 4, 5, 6).to(memory_format=torch.channels_last),
        torch.arange(1_000_000.0).view(1000, 1000)[:, 3],
        torch.ones(1, requires_grad=True).expand(100_000),
    ],
    ids=lambda t: f"{tuple(t.shape)}{t.stride()}",
)
def test_strided(tensor: torch.Tensor) -> None:
    (back,) = journey(tensor)
    assert torch.equal(back, tensor)
    assert (back.shape, back.stride(), back.is_conj()) == (tensor.shape, tensor.stride(), tensor.is_conj())
    assert back.requires_grad == tensor.requires_grad
    assert back.is_leaf
    if not tensor.is_conj():
        assert not back._is_view()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse().requires_grad_(),
        torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,)),
        torch.eye(4).to_sparse_csr(),
        torch.eye(4).to_sparse_csc(),
        torch.eye(4).to_sparse_bsr((2, 2)),
        torch.eye(4).to_sparse_bsc((2, 2)),
    ],
    ids=lambda t: str(t.layout),
)
def test_sparse(tensor: torch.Tensor) -> None:
    (back,) = journey(tensor)
    assert back.layout == tensor.layout
    assert torch.equal(back.to_dense(), tensor.to_dense())
    assert (back.requires_grad, back.is_leaf) == (tensor.requires_grad, True)
    if tensor.layout is torch.sparse_coo:
        assert back.is_coalesced() == tensor.is_coalesced()


def test_a_nested_tensor_without_parts() -> None:
    with pytest.raises(errors.CannotEncode, match="without parts"):
        pack([torch.nested.nested_tensor([])])
    torch.testing.assert_close(journey(torch.nested.nested_tensor([torch.ones(0)]))[0].unbind()[0], torch.ones(0))


def test_rare_kinds() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    meta = torch.empty(3, 4, device="meta").t()
    back = journey(quantized, nested, jagged, torch.ones(3).to_mkldnn(), meta)
    assert back[0].is_quantized
    assert torch.equal(back[0].dequantize(), quantized.dequantize())
    assert [list(part) for part in back[1].unbind()] == [[1, 1], [1, 1, 1]]
    assert [list(part) for part in back[2].unbind()] == [[1, 1], [1, 1, 1]]
    assert (back[3].is_mkldnn, back[4].is_meta, back[4].stride()) == (True, True, meta.stride())


def test_only_the_viewed_part_is_sent() -> None:
    base = torch.zeros(1_000_000)
    assert carried(base[10:20]) < 1000
    assert carried(base[:2000], base[-2000:]) < 17_000
    assert carried(base.view(1000, 1000)[:, 3]) < 5000
    assert carried(torch.tensor(1.0).expand(1000, 1000)) < 1000
    assert carried(torch.ones(1, requires_grad=True).expand(100_000)) < 1000


def test_large_memory_is_not_copied() -> None:
    source = torch.arange(ROOM)
    meta, (blob,), _ = pack([source])
    assert isinstance(blob, torch.Tensor)
    assert blob.data_ptr() == source.data_ptr()
    (back,) = unpack(meta, [blob])
    assert back.data_ptr() == source.data_ptr()


BASE = torch.ones(ROOM)


@pytest.mark.parametrize(
    ("tensors", "size"),
    [
        ([torch.ones(8), torch.ones(ROOM // 8), torch.ones(ROOM)], 32 + ROOM // 2 + 4 * ROOM),
        ([torch.ones(8).T, torch.ones(4, 4).T], 96),
        ([BASE, BASE[1:]], 4 * ROOM),  # one memory is sent once
        ([BASE[:9], BASE[:9]], 36),
        ([torch.ones(8).to_sparse()], 8 * 4 + 8 * 8),
        ([torch.tensor(1.0).expand(1000)], 4),
        ([torch.empty(1000, device="meta")], 0),
        ([], 0),
    ],
)
def test_the_bytes_of_tensors_are_counted_however_they_travel(tensors: list[torch.Tensor], size: int) -> None:
    assert pack(tensors)[2] == size


def test_small_tensors_are_packed_inline_while_there_is_room() -> None:
    half, small = torch.arange(ROOM // 8, dtype=torch.int32), torch.ones(SMALL // 4 - 1)
    assert not pack([half, half.clone()])[1]
    meta, (blob,), _ = pack([half, half.clone(), half.clone(), small])
    assert isinstance(blob, torch.Tensor)
    back = unpack(meta, [blob])
    assert all(map(torch.equal, back, [half, half, half, small]))
    half.fill_(0)
    assert back[0][-1] == ROOM // 8 - 1  # unpacked tensors do not share the memory of the sender


def test_blobs_may_begin_at_any_address() -> None:
    source = torch.arange(10_000)
    meta, (blob,), _ = pack([source])
    assert isinstance(blob, torch.Tensor)
    for shift in (8, 3):
        room = torch.empty(blob.numel() + shift, dtype=torch.uint8)
        room[shift:] = blob
        assert torch.equal(unpack(meta, [room[shift:]])[0], source)


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1,), (1, 1, 2000)])
def test_strides_of_single_elements(shape: tuple[Any, ...]) -> None:
    tensor = (
        torch.ones(3).as_strided(shape, [0] * len(shape))
        if shape[-1] > 3
        else torch.ones(9).as_strided(shape, (1,) * len(shape))
    )
    for made in (tensor, torch.ones(shape), torch.ones(*shape, 2)[..., 0]):
        (back,) = journey(made)
        assert torch.equal(back, made)
        assert back.stride() == made.stride()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tensors_of_inference_mode_and_other_modes(mode: type[Any]) -> None:
    parameter = torch.ones(5, requires_grad=True)
    with mode():
        made, large = torch.ones(5) * 2, torch.ones(5000)
        back = journey(made, large, made[1:], parameter, made.view(5, 1)[::2])
        assert torch.equal(back[0], made)
    assert not any(tensor.is_inference() for tensor in back)
    assert back[3].requires_grad
    (back[3] * back[0]).sum().backward()
    assert back[3].grad.tolist() == [2] * 5
    assert torch.equal(journey(made)[0], made)


def test_the_default_device_has_no_effect() -> None:
    tensors = [
        torch.ones(3),
        torch.empty(0),
        torch.ones(5000),
        torch.ones(4000).view(2, 2000).t(),
        torch.ones(900, 9)[:, 3],
    ]
    with torch.device("meta"):
        back = journey(*tensors, torch.ones(2, device="cpu").to_sparse())
    assert all(tensor.is_cpu for tensor in back)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=False))


def test_the_sent_tensor_does_not_change() -> None:
    leaf = torch.ones(5000, requires_grad=True)
    result = (leaf * 2)[::2]
    before = result.grad_fn, result._version, leaf._version, result.untyped_storage().nbytes()
    (back,) = journey(result)
    back.detach().zero_()
    assert (result.grad_fn, result._version, leaf._version, result.untyped_storage().nbytes()) == before
    assert result[0] == 2


@pytest.mark.nightly
def test_compiled_results() -> None:
    function = torch.compile(lambda x: x * 2, backend="aot_eager")
    made = function(torch.ones(3, requires_grad=True))
    (back,) = journey(made)
    assert (back.tolist(), back.requires_grad, back.is_leaf) == ([2, 2, 2], True, True)


@pytest.mark.parametrize("size", [4, 50_000])
@pytest.mark.parametrize("offset", [0, 1])
def test_memory_that_was_freed(size: int, offset: int) -> None:
    tensor = torch.ones(size)[offset:]
    tensor.untyped_storage().resize_(0)
    with pytest.raises(errors.CannotEncode, match="its memory was freed"):
        pack([tensor])


def test_two_storages_over_the_same_memory() -> None:
    array = numpy.arange(1000.0)
    whole, part = torch.from_numpy(array), torch.from_numpy(array[100:200])
    back = journey(whole, part)
    back[0].zero_()
    assert not back[1].any()
    halves = torch.from_numpy(array[:600]), torch.from_numpy(array[400:])  # no storage contains both
    assert all(torch.equal(a, b) for a, b in zip(journey(*halves), halves, strict=True))


def test_parts_of_sparse_tensors_stay_together() -> None:
    indices, values = torch.tensor([[0, 2]]), torch.ones(2)
    first, second, dense = journey(
        torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True),
        torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True),
        values,
    )
    dense.fill_(5)
    assert first.to_dense().tolist() == second.to_dense().tolist() == [5, 0, 5]


def test_a_dtype_that_this_torch_does_not_have() -> None:
    meta, blobs, _ = pack([torch.ones(1)])
    with pytest.raises(errors.CannotDecode, match="same version of torch"):
        unpack(meta.replace(b"float32", b"float99"), [blob for blob in blobs if isinstance(blob, torch.Tensor)])


def test_fake_tensors_cannot_be_sent() -> None:
    with FakeTensorMode():
        fakes = torch.ones(3), torch.ones(3000)
    for fake in fakes:
        with pytest.raises(errors.CannotEncode, match="cannot be sent"):
            pack([fake])


@pytest.mark.parametrize("size", [3, 3000])
def test_zeros_without_memory(size: int) -> None:
    assert torch.equal(journey(torch._efficientzerotensor(size))[0], torch.zeros(size))


def test_another_device_is_refused_with_advice() -> None:
    class Elsewhere:
        layout, is_nested, is_quantized, is_cpu, is_meta = torch.strided, False, False, False, False
        device, dtype = torch.device("cuda:0"), torch.float32

    with pytest.raises(errors.DeviceError, match=r"cuda:0.*cpu\(\)"):
        pack([Elsewhere()])  # type: ignore[list-item]


@st.composite
def views(draw: Callable[..., Any]) -> torch.Tensor | None:
    shape = draw(st.lists(st.integers(0, 5), min_size=0, max_size=4))
    strides = [draw(st.integers(0, 7)) for _ in shape]
    offset = draw(st.integers(0, 9))
    extent = offset + 1 + sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True))
    return torch.arange(extent, dtype=draw(st.sampled_from([torch.int64, torch.int16, torch.uint8]))).as_strided(
        shape, strides, offset
    )


@given(st.lists(views(), max_size=4))
def test_any_views(tensors: list[Tensor] | list[torch.Tensor]) -> None:
    for back, tensor in zip(journey(*tensors), tensors, strict=True):
        assert torch.equal(back, tensor)
        assert back.stride() == tensor.stride() or tensor.is_contiguous()  # other strides may be contiguous, too


@st.composite
def parts_of_one(draw: Callable[..., Any]) -> tuple[torch.Tensor, list[Callable[..., Any]]]:
    """Draw views of one storage, as functions of the storage."""
    size = draw(st.sampled_from([16, 3000]))
    takes = []
    for _ in range(draw(st.integers(2, 4))):
        part = slice(draw(st.integers(0, size)), draw(st.integers(0, size)), draw(st.integers(1, 3)))
        dtype = draw(st.sampled_from([torch.int32, torch.uint8, torch.bfloat16, torch.complex128]))
        takes.append(lambda base, part=part, dtype=dtype: base.view(dtype)[part])
    return torch.zeros(4 * size, dtype=torch.int32), takes


@given(parts_of_one())
def test_writes_to_received_views_have_the_effect_that_they_have_at_the_sender(
    drawn: tuple[Tensor, list[Callable[..., Any]]] | tuple[torch.Tensor, list[Callable[..., Any]]],
) -> None:
    base, takes = drawn
    sent = [take(base) for take in takes]
    arrived = journey(*sent)
    for number, (at_home, there) in enumerate(zip(sent, arrived, strict=True)):
        at_home.fill_(number + 1)
        there.fill_(number + 1)
        assert all(torch.equal(a, b) for a, b in zip(sent, arrived, strict=True))


@pytest.mark.parametrize("size", [3, 9000])
def test_parts_of_complex_numbers_stay_together(size: int) -> None:
    source = torch.randn(size, 2, dtype=torch.complex64)[:, 0]
    conjugate, real, imaginary, negative, whole = back = journey(
        source.conj(), source.real, source.imag, source.conj().imag, source
    )
    assert all(torch.equal(a, b) for a, b in zip(back[:2], (source.conj(), source.real), strict=True))
    assert conjugate.is_conj()
    assert negative.is_neg()
    assert torch.equal(negative, -source.imag)
    whole.fill_(1 + 2j)
    assert [part[0].item() for part in (conjugate, real, imaginary, negative)] == [1 - 2j, 1, 2, -2]
    assert torch.equal(journey(source.conj())[0], source.conj())


@pytest.mark.parametrize("size", [3, 9000])
def test_received_tensors_behave_like_any_tensor(size: int) -> None:
    (back,) = journey(torch.ones(size))
    assert copy.deepcopy(back).add_(1).sum() == 2 * size
    assert torch.equal(pickle.loads(pickle.dumps(back)), back)
    assert back.numpy().flags.writeable
    assert back.share_memory_().is_shared()
    assert back.requires_grad_().mul(2).sum().backward() is None
    assert back.grad.sum() == 2 * size


def test_memory_is_writable() -> None:
    blob = torch.zeros(4, dtype=torch.uint8)
    memory(blob)[2] = 7
    assert blob.tolist() == [0, 0, 7, 0]
    assert len(memory(torch.empty(0, dtype=torch.uint8))) == 0


def test_memory_ignores_changes_of_ctypes_prototypes(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = ctypes.pythonapi.PyMemoryView_FromMemory
    monkeypatch.setattr(shared, "argtypes", (ctypes.c_char_p, ctypes.c_ssize_t, ctypes.c_int))
    assert memory(torch.ones(4, dtype=torch.uint8)).tolist() == [1, 1, 1, 1]


WARNED = """
import warnings
import torch
from telegrad._core.wire.packing import pack
from telegrad._core.wire.packing import unpack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tensors = [
        torch.ones(50_000).to(torch.complex32),
        torch.ones(3, 1).to(torch.complex32).expand(3, 4),
        *(torch.eye(4).to_sparse(layout=layout) for layout in (torch.sparse_csr, torch.sparse_csc)),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ]
torch.set_warn_always(True)
for tensor in tensors:
    meta, blobs, _ = pack([tensor])
    unpack(meta, [blob.clone() for blob in blobs])
"""


@pytest.mark.nightly
def test_torch_does_not_warn_about_sent_tensors() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", WARNED], check=True, timeout=PATIENCE)
