"""Small models of every family with data to train on, and their losses as a user would write them.

Each is built twice by tests: by Penstock from its source, and plainly, as the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from compiled_programs import always_the_same
from torch import nn
from torch.nn import functional as F

from penstock.data import ArraySource
from penstock.models import InputSpec, ModelSource

VOCABULARY = 96
LENGTH = 16
ROWS = 64
IGNORED = -100

_SIZES = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GPT = {"vocab_size": VOCABULARY, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64}
_ROTARY = {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

FIELDS: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT, **_NO_TOKENS, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gptj": {**_GPT, **_NO_TOKENS, "rotary_dim": 8},
    "opt": {**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "llama": {**_SIZES, **_ROTARY, **_NO_TOKENS},
    "qwen3": {**_SIZES, **_ROTARY, **_NO_TOKENS},
    "bert": {
        **_SIZES,
        "intermediate_size": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}


@dataclass(frozen=True)
class Case:
    """A model: `build` makes it plainly, `source` for Penstock, `loss` of one micro-batch.

    `summed` losses are sums over labelled tokens, others are means over the micro-batch.
    """

    name: str
    build: Callable[[], nn.Module]
    source: Callable[[int], ModelSource]
    loss: Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]
    arrays: Callable[[int], dict[str, np.ndarray]]
    summed: bool = True

    def plain(self, seed: int) -> nn.Module:
        """Return the model as PyTorch builds it from `seed`."""
        torch.manual_seed(seed)
        return self.build().train()

    def data(self, seed: int) -> ArraySource:
        """Return rows in memory, which both sides draw from."""
        return ArraySource(self.arrays(seed), seed=seed)


def _texts(seed: int) -> dict[str, np.ndarray]:
    """Sequences in which the next token mostly follows from the last, so that there is a signal."""
    random = np.random.default_rng([seed, 7])
    follower = random.permutation(VOCABULARY)
    tokens = np.empty((ROWS, LENGTH + 1), np.int64)
    tokens[:, 0] = random.integers(VOCABULARY, size=ROWS)
    for place in range(LENGTH):
        guess = random.integers(VOCABULARY, size=ROWS)
        tokens[:, place + 1] = np.where(
            random.random(ROWS) < 0.8, follower[tokens[:, place]], guess
        )
    labels = tokens[:, 1:].copy()
    labels[random.random(labels.shape) < 0.1] = IGNORED  # micro-batches of unequal weight
    return {"input_ids": tokens[:, :-1].copy(), "labels": labels}


def _masked_texts(seed: int) -> dict[str, np.ndarray]:
    rows = _texts(seed)
    random = np.random.default_rng([seed, 11])
    tokens = rows["input_ids"]
    chosen = random.random(tokens.shape) < 0.3
    return {
        "input_ids": np.where(chosen, VOCABULARY - 1, tokens),
        "attention_mask": np.ones_like(tokens),
        "labels": np.where(chosen, tokens, IGNORED),
    }


def _token_loss(model: nn.Module, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: value for name, value in rows.items() if name != "labels"}
    logits = model(**inputs).logits.float()
    return F.cross_entropy(
        logits.flatten(0, 1), rows["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
    )


_SOURCES: dict[str, ModelSource] = {}


def _source_of(config: dict[str, Any]) -> ModelSource:
    """Return the source of a configuration; tests share it, since nothing changes a source."""
    key = repr(sorted(config.items()))
    if key not in _SOURCES:
        _SOURCES[key] = ModelSource.from_hf_config(config)
    return _SOURCES[key]


def language_model(family: str, **changes: Any) -> Case:
    """Return a `transformers` model of a family, its configuration changed."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    fields = {**FIELDS[family], **changes}
    auto_class = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    return Case(
        family,
        lambda: auto_class.from_config(AutoConfig.for_model(family, **fields), dtype=torch.float32),
        lambda seed: _source_of({"model_type": family, **fields}),
        _token_loss,
        _masked_texts if family == "bert" else _texts,
    )


_DEEPSEEK = {
    **_SIZES,
    **_NO_TOKENS,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def deepseek() -> Case:
    """Return a DeepSeek-V3, whose attention and experts write tensors in place."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("deepseek_v3", **_DEEPSEEK)
    return Case(
        "deepseek_v3",
        lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32),
        lambda seed: ModelSource.from_hf_config({"model_type": "deepseek_v3", **_DEEPSEEK}),
        _token_loss,
        _texts,
    )


class Translator(nn.Module):
    """A T5 with the loss that it computes itself."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
        self.model = T5ForConditionalGeneration(config)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss [] of tokens and labels, both [rows, tokens]."""
        return self.model(input_ids=input_ids, labels=labels, use_cache=False).loss


def t5() -> Case:
    """Return a T5, which adds its position bias in place."""
    tokens = InputSpec((LENGTH,), torch.int64)
    return Case(
        "t5",
        Translator,
        _built(Translator, inputs={"input_ids": tokens, "labels": tokens}),
        lambda model, rows: model(**rows),
        _texts,
        summed=False,
    )


class Perceptron(nn.Module):
    """A plain stack of layers, without containers that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.second = nn.Linear(40, 24)
        self.third = nn.Linear(24, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, 6] to [rows, 2]."""
        return self.third(torch.tanh(self.second(torch.relu(self.first(x)))))


class Wide(nn.Module):
    """A stack with weights that a store in shards cuts, and some that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 160)
        self.second = nn.Linear(160, 100)
        self.third = nn.Linear(100, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, 6] to [rows, 2]."""
        return self.third(torch.tanh(self.second(torch.relu(self.first(x)))))


class Classifier(nn.Module):
    """A small convolutional network for images of one channel, 12 x 12."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.GroupNorm(2, 6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 10, 3, stride=2),
            nn.GELU(),
        )
        self.head = nn.Linear(40, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[rows, 1, 12, 12] to logits [rows, 5]."""
        return self.head(self.features(image).flatten(1))


class Contrastive(nn.Module):
    """A user's own module with a loss of its own: two views of a row are to agree."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.norm = nn.LayerNorm(12)
        self.temperature = nn.Parameter(torch.zeros(()))

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        return F.normalize(self.norm(x), dim=-1)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return the loss [] of two views, each [rows, 12]."""
        scores = self.embed(left) @ self.embed(right).T * self.temperature.exp()
        return -scores.log_softmax(dim=-1).diagonal().mean()


def mean_squared_error(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A user's loss [] of predictions and targets, both [rows, 2]."""
    return ((output - y) ** 2).mean()


def smoothed_cross_entropy(output: torch.Tensor, category: torch.Tensor) -> torch.Tensor:
    """A user's loss [] of logits [rows, 5] and categories [rows]."""
    return F.cross_entropy(output, category, label_smoothing=0.1)


def _points(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([seed, 1])
    x = random.standard_normal((ROWS, 6)).astype(np.float32)
    return {"x": x, "y": np.stack([np.sin(x).sum(1), x.prod(1)], axis=1)}


def _images(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([seed, 2])
    return {
        "image": random.standard_normal((ROWS, 1, 12, 12)).astype(np.float32),
        "category": random.integers(5, size=ROWS),
    }


def _views(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([seed, 3])
    left = random.standard_normal((ROWS, 12)).astype(np.float32)
    noise = random.standard_normal((ROWS, 12)).astype(np.float32)
    return {"left": left, "right": left[:, ::-1] + 0.3 * noise}


def _built(build: Callable[[], nn.Module], **options: Any) -> Callable[[int], ModelSource]:
    def source(seed: int) -> ModelSource:
        torch.manual_seed(seed)
        return always_the_same(ModelSource.from_module(build(), **options), build.__name__)

    return source


PERCEPTRON = Case(
    "perceptron",
    Perceptron,
    # By reference, as a configuration names it: the weights come from the seed of the run.
    lambda seed: always_the_same(
        ModelSource.from_factory(
            "tiny_models:Perceptron",
            loss="tiny_models:mean_squared_error",
            inputs={"x": InputSpec((6,))},
            targets={"y": InputSpec((2,))},
        ),
        "Perceptron",
    ),
    lambda model, rows: mean_squared_error(model(rows["x"]), rows["y"]),
    _points,
    summed=False,
)
WIDE = Case(
    "wide",
    Wide,
    _built(
        Wide,
        loss=mean_squared_error,
        inputs={"x": InputSpec((6,))},
        targets={"y": InputSpec((2,))},
    ),
    lambda model, rows: mean_squared_error(model(rows["x"]), rows["y"]),
    _points,
    summed=False,
)
CLASSIFIER = Case(
    "classifier",
    Classifier,
    _built(
        Classifier,
        loss=smoothed_cross_entropy,
        inputs={"image": InputSpec((1, 12, 12))},
        targets={"category": InputSpec((), torch.int64)},
    ),
    lambda model, rows: smoothed_cross_entropy(model(rows["image"]), rows["category"]),
    _images,
    summed=False,
)
CONTRASTIVE = Case(
    "contrastive",
    Contrastive,
    _built(Contrastive, inputs={"left": InputSpec((12,)), "right": InputSpec((12,))}),
    lambda model, rows: model(**rows),
    _views,
    summed=False,
)

CASES: dict[str, Callable[[], Case]] = {
    **{name: (lambda name=name: language_model(name)) for name in FIELDS},
    "perceptron": lambda: PERCEPTRON,
    "classifier": lambda: CLASSIFIER,
    "contrastive": lambda: CONTRASTIVE,
}


def with_rows(case: Case, rows: Mapping[str, np.ndarray]) -> Case:
    """Return the case with rows of the test's own."""
    return replace(case, arrays=lambda seed: dict(rows))
