"""All modules, optimizers and schedulers of torch, made with small arguments, and the programs that run them.

A class that a later torch adds has no entry here, so its test fails until it gets one.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

GENERATED = {
    "Modules": ["all modules of `torch.nn`, made there or sent"],
    "Optimizers": [
        "all optimizers of `torch.optim` whose step needs no closure, with each of their options",
        "all schedulers of `torch.optim.lr_scheduler`, and `SWALR`",
    ],
}


class Case(NamedTuple):
    """The way to make a module, and its inputs: shapes of random numbers, or tensors."""

    make: Callable[[], nn.Module]
    inputs: Sequence[tuple[int, ...] | Tensor]


def _classes(module: Any, base: type, without: set[str]) -> dict[str, Any]:
    found = {name: kind for name, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, base)}
    return {name: kind for name, kind in found.items() if name not in without and not name.startswith("_")}


# Modules

NO_FORWARD = {"Module", "Container", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict"}
NO_FORWARD |= {"RNNBase", "RNNCellBase"}
IN_TORCH = _classes(nn, nn.Module, NO_FORWARD)

SMALL = (2, 4)
GRID = {1: (2, 4, 4), 2: (2, 4, 4, 4), 3: (2, 4, 4, 4, 4)}  # keyed by dimensions; two samples of four channels each
SIGNS = torch.tensor([1.0, -1.0], dtype=torch.float64)
CLASSES = torch.tensor([1, 3])
BITS = torch.tensor([[0.0, 1, 1, 0], [1, 0, 1, 0]], dtype=torch.float64)
SHARES = torch.linspace(0.1, 0.9, 8, dtype=torch.float64).reshape(SMALL)

MODULES: dict[str, Case] = {}


def _add(names: str, *args: Any, inputs: Sequence[tuple[int, ...] | Tensor] = (SMALL,), **options: Any) -> None:
    for name in names.split():
        if name in IN_TORCH:  # an older torch does not have all classes
            MODULES[name] = Case(partial(IN_TORCH[name], *args, **options), inputs)


_add("CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish PReLU RReLU ReLU")
_add("SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Flatten Dropout AlphaDropout FeatureAlphaDropout")
_add("ReLU6")
_add("Softmax LogSoftmax Softmin", 1)
_add("Threshold", 0.1, 2.0)
_add("Unflatten", 1, (2, 2))
_add("Softmax2d", inputs=(GRID[2],))
for dimensions, shape in GRID.items():
    grid = partial(_add, inputs=(shape,))
    end = f"{dimensions}d"
    grid(f"Dropout{end} LazyBatchNorm{end}")
    grid(f"AdaptiveAvgPool{end} AdaptiveMaxPool{end} AvgPool{end} MaxPool{end}", 2)
    grid(f"LPPool{end}", 2, 2)
    grid(f"FractionalMaxPool{end}", 2, output_size=2)
    pooled = [2] * dimensions
    places = 2 * torch.arange(2**dimensions).reshape(pooled).expand(2, 4, *pooled)
    _add(f"MaxUnpool{end}", 2, inputs=((2, 4, *pooled), places))
    grid(f"BatchNorm{end}", 4)
    grid(f"InstanceNorm{end}", 4, affine=True)
    grid(f"LazyInstanceNorm{end}", affine=True)
    grid(f"Conv{end} ConvTranspose{end}", 4, 2, 2)
    grid(f"LazyConv{end} LazyConvTranspose{end}", 2, 2)
    grid(f"CircularPad{end} ReflectionPad{end} ReplicationPad{end} ZeroPad{end}", 1)
    grid(f"ConstantPad{end}", 1, 0.5)
_add("SyncBatchNorm", 4, inputs=(GRID[2],))
_add("ChannelShuffle PixelShuffle PixelUnshuffle Unfold CrossMapLRN2d LocalResponseNorm", 2, inputs=(GRID[2],))
_add("Fold", (4, 4), 2, inputs=((2, 4, 9),))
_add("Upsample UpsamplingBilinear2d UpsamplingNearest2d", scale_factor=2, inputs=(GRID[2],))
_add("GroupNorm", 2, 4, inputs=(GRID[1],))
_add("LayerNorm RMSNorm", 4)
_add("Linear", 4, 3)
_add("LazyLinear", 3)
_add("Bilinear", 4, 4, 3, inputs=(SMALL, SMALL))
_add("Embedding EmbeddingBag", 5, 4, inputs=(torch.tensor([[0, 1], [3, 1]]),))

_add("L1Loss MSELoss SmoothL1Loss HuberLoss PoissonNLLLoss CosineSimilarity PairwiseDistance", inputs=(SMALL, SMALL))
_add("KLDivLoss", inputs=(SMALL, SHARES), reduction="batchmean")
_add("BCELoss", inputs=(SHARES, BITS))
_add("BCEWithLogitsLoss MultiLabelSoftMarginLoss", inputs=(SMALL, BITS))
_add("GaussianNLLLoss", inputs=(SMALL, SMALL, SHARES))
_add("HingeEmbeddingLoss SoftMarginLoss", inputs=(SMALL, 2 * BITS - 1))
_add("MultiLabelMarginLoss", inputs=(SMALL, torch.tensor([[1, 2, -1, 0], [3, -1, 0, 0]])))
_add("CrossEntropyLoss MultiMarginLoss", inputs=(SMALL, CLASSES))
_add("NLLLoss", inputs=(SMALL, CLASSES))
_add("NLLLoss2d", inputs=(GRID[2], torch.ones(2, 4, 4, dtype=torch.int64)))
_add("MarginRankingLoss", inputs=((2,), (2,), SIGNS))
_add("CosineEmbeddingLoss", inputs=(SMALL, SMALL, SIGNS))
_add("TripletMarginLoss TripletMarginWithDistanceLoss", inputs=(SMALL, SMALL, SMALL))
_add("CTCLoss", inputs=((4, 2, 3), torch.tensor([[1, 2], [2, 1]]), torch.tensor([4, 4]), torch.tensor([2, 1])))
_add("AdaptiveLogSoftmaxWithLoss", 4, 6, [2], inputs=(SMALL, CLASSES))
_add("LinearCrossEntropyLoss", 4, 5, inputs=(SMALL, CLASSES))

_add("RNN GRU LSTM", 4, 3, inputs=((2, 2, 4),))
_add("RNNCell GRUCell LSTMCell", 4, 3)
_add("MultiheadAttention", 4, 2, inputs=((3, 2, 4),) * 3)
_add("TransformerEncoderLayer", 4, 2, 8, inputs=((3, 2, 4),))
_add("TransformerDecoderLayer", 4, 2, 8, inputs=((3, 2, 4),) * 2)
_add("Transformer", 4, 2, 1, 1, 8, inputs=((3, 2, 4),) * 2)
MODULES["TransformerEncoder"] = Case(
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 1), MODULES["TransformerEncoderLayer"].inputs
)
MODULES["TransformerDecoder"] = Case(
    lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8), 1), MODULES["TransformerDecoderLayer"].inputs
)
MODULES["Sequential"] = Case(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), (SMALL,))
MODULES["DataParallel"] = Case(lambda: nn.DataParallel(nn.Linear(4, 3)), (SMALL,))


def _given(case: Case) -> list[Tensor]:
    """Return the inputs of a module; the first one and all random ones require a gradient."""
    chance = torch.Generator().manual_seed(1)
    given: list[Tensor] = []
    for number, each in enumerate(case.inputs):
        if isinstance(each, tuple):
            given.append(torch.randn(each, generator=chance, dtype=torch.float64).requires_grad_())
        else:
            given.append(each.clone().requires_grad_(number == 0 and each.is_floating_point()))
    return given


def _score(outputs: Any) -> Tensor:
    differentiable = [each for each in _tensors(outputs) if each.requires_grad]
    return torch.stack([each.pow(2).sum() for each in differentiable]).sum()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def made_there(name: str, made: Any, backward: Any, gradients: Any, optimizer: Any) -> Any:
    case = MODULES[name]
    with torch.random.fork_rng():
        trains = any(True for _ in case.make().parameters())
    module, given = made(case.make).double(), _given(case)
    outputs = module(*given)
    backward(_score(outputs))
    if trains:
        optimizer(torch.optim.SGD, module, lr=0.1).step()
    return [outputs, gradients(*[each for each in given if each.requires_grad]), module.state_dict()]


def sent(name: str, call: Any, backward: Any, gradients: Any) -> Any:
    case = MODULES[name]
    module, given = case.make().double(), _given(case)
    if any(nn.parameter.is_lazy(each) for each in module.parameters()):  # lazy parameters are refused in a context
        with torch.random.fork_rng(), torch.no_grad():
            module(*given)
    outputs = call(_applied, module, *given)
    backward(_score(outputs))
    return [outputs, gradients(*[each for each in given if each.requires_grad], *module.parameters())]


def _applied(module: nn.Module, *given: Tensor) -> Any:
    return module(*given)


# Optimizers

NEEDS_CLOSURE = {"Optimizer", "LBFGS"}
OPTIMIZERS = _classes(torch.optim, torch.optim.Optimizer, NEEDS_CLOSURE)
ELSEWHERE = {"capturable", "differentiable"}  # options for accelerators and for non-leaf parameters


def options_of(name: str) -> list[str]:
    """Return the boolean options of an optimizer, and "" for none of them."""
    parameters = inspect.signature(OPTIMIZERS[name]).parameters.values()
    flags = [each.name for each in parameters if isinstance(each.default, bool) or each.name in ("foreach", "fused")]
    return ["", *[each for each in flags if each not in ELSEWHERE]]


def trained(name: str, option: str, made: Any, backward: Any, optimizer: Any) -> Any:
    """Return the state of a model after three steps, or the reason why the optimizer cannot be used."""
    kind = OPTIMIZERS[name]
    options: dict[str, Any] = {option: True} if option else {}
    if option == "nesterov" and name == "SGD":
        options["momentum"] = 0.9
    sparse = name == "SparseAdam"
    if sparse:
        module = made(nn.Embedding, 5, 3, sparse=True, dtype=torch.float64)
    else:
        module = made(nn.Linear, 3, 3, bias=False, dtype=torch.float64)
    try:
        steps = optimizer(kind, module, lr=0.1, **options)
        for number in range(3):
            given = torch.tensor([number, 1, 1]) if sparse else torch.full((2, 3), number + 1.0, dtype=torch.float64)
            backward(module(given).pow(2).sum())
            steps.step()
    except RuntimeError as error:
        return error
    return module.state_dict()


# Schedulers

_L = torch.optim.lr_scheduler
SCHEDULED = {**_classes(_L, _L.LRScheduler, {"LRScheduler"}), "SWALR": torch.optim.swa_utils.SWALR}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: _L.LambdaLR(o, lambda epoch: 0.5**epoch),
    "MultiplicativeLR": lambda o: _L.MultiplicativeLR(o, lambda epoch: 0.5),
    "StepLR": lambda o: _L.StepLR(o, 1),
    "MultiStepLR": lambda o: _L.MultiStepLR(o, [1]),
    "ConstantLR": lambda o: _L.ConstantLR(o),
    "LinearLR": lambda o: _L.LinearLR(o),
    "ExponentialLR": lambda o: _L.ExponentialLR(o, 0.5),
    "CosineAnnealingLR": lambda o: _L.CosineAnnealingLR(o, 3),
    "PolynomialLR": lambda o: _L.PolynomialLR(o),
    "CyclicLR": lambda o: _L.CyclicLR(o, 0.1, 0.2),
    "OneCycleLR": lambda o: _L.OneCycleLR(o, 0.2, 10),
    "CosineAnnealingWarmRestarts": lambda o: _L.CosineAnnealingWarmRestarts(o, 2),
    "ReduceLROnPlateau": lambda o: _L.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": lambda o: _L.ChainedScheduler([_L.ConstantLR(o), _L.ExponentialLR(o, 0.9)]),
    "SequentialLR": lambda o: _L.SequentialLR(o, [_L.ConstantLR(o), _L.ExponentialLR(o, 0.9)], [2]),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01),
}


def scheduled(name: str, made: Any, backward: Any, optimizer: Any) -> Any:
    """Return learning rates and states of a model; a scheduler that was loaded from a state does half of the work."""
    module = made(nn.Linear, 3, 3, dtype=torch.float64)
    steps = optimizer(torch.optim.SGD, module, lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](steps.own)
    found: list[Any] = []
    for number in range(4):
        if number == 2 and name not in ("LambdaLR", "MultiplicativeLR"):  # their states lack the functions
            state = scheduler.state_dict()
            scheduler = SCHEDULERS[name](steps.own)
            scheduler.load_state_dict(state)
        backward(module(torch.ones(2, 3, dtype=torch.float64)).pow(2).sum())
        steps.step()
        scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
        found += [float(steps.own.param_groups[0]["lr"]), scheduler.get_last_lr(), copy.deepcopy(module.state_dict())]
    return found
