"""Models as in libraries, cut in the middle or automatically, train as in one process."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

import telegrad.autograd as autograd
from telegrad.nn import Pipeline
from telegrad.optim import DistributedOptimizer

pytestmark = pytest.mark.usefixtures("here")

WORDS, LENGTH = 50, 10


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, value: Tensor) -> Tensor:
        batch, length, width = value.size()
        heads = self.inputs(self.before(value)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, own = heads.permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(query, key, own, is_causal=True)
        value = value + self.outputs(found.transpose(1, 2).reshape(batch, length, width))
        return value + self.wide(self.behind(value))


class GPT(nn.Module):
    """A usual language model, with tied weights of the embedding and the head."""

    def __init__(self, width: int = 32, block_size: int = 32) -> None:
        super().__init__()
        self.block_size = block_size
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Attention(width, 4) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor, targets: Tensor | None = None) -> Tensor:
        _, length = words.shape
        assert length <= self.block_size, "too many words"
        value = self.words(words) + self.places(torch.arange(length, device=words.device))
        for block in self.blocks:
            value = block(value)
        logits: Tensor = self.head(self.norm(value))
        return logits if targets is None else cross_entropy(logits.flatten(0, 1), targets.flatten())


class Encoder(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True, dropout=0.0)
        self.words, self.encoder = nn.Embedding(WORDS, width), nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.encoder(self.words(words), mask=mask, is_causal=True))


class Residual(nn.Module):
    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.one, self.norm_one = nn.Conv2d(given, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.two, self.norm_two = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.aside = (
            nn.Sequential(nn.Conv2d(given, width, 1, stride, bias=False), nn.BatchNorm2d(width)) if stride > 1 else None
        )

    def forward(self, value: Tensor) -> Tensor:
        found = self.norm_two(self.two(self.relu(self.norm_one(self.one(value)))))
        found += value if self.aside is None else self.aside(value)
        return self.relu(found)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(Residual(8, 8, 1), Residual(8, 8, 1))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16, 1))
        self.pool, self.last = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 5)

    def forward(self, value: Tensor) -> Tensor:
        return self.last(torch.flatten(self.pool(self.layer2(self.layer1(self.begin(value)))), 1))


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    at: str
    inputs: Callable[[], Any]
    targets: Callable[[], Tensor]


def words() -> Tensor:
    return torch.randint(WORDS, (6, LENGTH))


def pictures() -> Tensor:
    return torch.randn(6, 3, 16, 16).double()


def classes(count: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(count, (6,))


def pairs() -> dict[str, Tensor]:
    return {"src": torch.randn(6, 5, 32).double(), "tgt": torch.randn(6, 7, 32).double()}


CASES = {
    "a GPT": Case(GPT, "blocks.2", words, words),
    "nn.TransformerEncoder": Case(Encoder, "encoder.layers.2", words, words),
    "nn.Transformer": Case(
        lambda: nn.Transformer(32, 4, 2, 2, 64, 0.0, batch_first=True),
        *("decoder", pairs, lambda: torch.randn(6, 7, 32).double()),
    ),
    "a ResNet": Case(ResNet, "layer2.1", pictures, classes(5)),
}


def of_library(name: str) -> Case:
    library: Any = pytest.importorskip("transformers")

    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    tokens = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if name == "GPT-2":
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        gpt2 = library.GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=32, **tokens, **drop)
        return Case(lambda: library.GPT2LMHeadModel(gpt2), "transformer.h.2", uncached, words)
    if name == "Llama":
        llama = library.LlamaConfig(**sizes, **tokens, max_position_embeddings=64)
        return Case(lambda: library.LlamaForCausalLM(llama), "model.layers.2", uncached, words)
    if name == "T5":
        t5 = library.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, **tokens)
        return Case(lambda: library.T5ForConditionalGeneration(t5), "decoder", both, words)
    if name == "BERT":
        bert = library.BertConfig(**sizes, **still, vocab_size=WORDS)
        return Case(lambda: library.BertForSequenceClassification(bert), "bert.encoder.layer.2", words, classes(2))
    vit = library.ViTConfig(**sizes, **still, image_size=16, patch_size=4)
    return Case(lambda: library.ViTForImageClassification(vit), "vit.layers.2", pictures, classes(2))


def uncached() -> dict[str, Any]:
    return {"input_ids": words(), "use_cache": False}


def both() -> dict[str, Any]:
    return {"input_ids": words(), "decoder_input_ids": words(), "use_cache": False}


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    found = logits(outputs)
    return (
        mse_loss(found, targets)
        if targets.is_floating_point()
        else cross_entropy(found.flatten(0, -2), targets.flatten())
    )


def applied(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def part(inputs: Any, start: int) -> Any:
    if isinstance(inputs, dict):
        return {name: part(value, start) for name, value in inputs.items()}
    return inputs[start : start + 2] if isinstance(inputs, Tensor) else inputs


def check(case: Case, at: list[str] | None, steps: int = 10) -> None:
    torch.manual_seed(0)
    model = case.make().double().train()
    whole = copy.deepcopy(model)
    pipeline = Pipeline.split(model, ["w1", "w2"], at=at, chunks=3, example=case.inputs())
    ours = DistributedOptimizer.for_module(torch.optim.SGD, pipeline, lr=0.05)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.05)
    for step in range(steps):
        for module in (pipeline, whole):
            module.train(step % 4 != 3)
        inputs, targets = case.inputs(), case.targets()
        with autograd.context() as context:
            loss = pipeline.forward_backward(context, inputs, targets, loss_of)
            ours.step(context)
        theirs.zero_grad()
        losses = []
        for start in (0, 2, 4):
            losses.append(loss_of(applied(whole, part(inputs, start)), targets[start : start + 2]) / 3)
            losses[-1].backward()
        theirs.step()
        torch.testing.assert_close(loss, torch.stack(losses).sum().detach())
    state = pipeline.state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    inputs = case.inputs()
    with torch.no_grad():
        torch.testing.assert_close(
            logits(pipeline.eval()(inputs)), logits(applied(whole.eval(), inputs)), rtol=1e-5, atol=1e-6
        )
    if at is None:
        shared = sum(parameter.numel() for parameter in model.parameters())
        sizes = [sum(value.numel() for value in stage.state_dict().values()) for stage in pipeline.stages]
        assert max(sizes) <= 1.5 * shared / len(sizes)


def logits(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs["logits"]


@pytest.mark.nightly
@pytest.mark.parametrize("itself", [False, True], ids=["at", "by itself"])
@pytest.mark.parametrize("name", [*CASES, "GPT-2", "Llama", "T5", "BERT", "ViT"])
def test_a_model_trains_as_in_one_process(name: str, itself: bool) -> None:
    case = CASES.get(name) or of_library(name)
    check(case, None if itself else [case.at])
