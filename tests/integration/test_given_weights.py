"""Weights that a run is given: of half precision, and of numbers that are none."""

import math

import pytest
import torch
from hf_folders import save
from plain_training import Recipe, assert_same_training, streamed, trainer_of
from tiny_models import PERCEPTRON, InputSpec, Perceptron, language_model, mean_squared_error
from torch import nn
from transformers import AutoModelForCausalLM

from penstock import Trainer
from penstock.errors import ConfigError
from penstock.models import ModelSource
from penstock.telemetry.events import Notice


class Mixed(nn.Module):
    """Parameters and buffers of four types, tied and frozen ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 24, dtype=torch.bfloat16)
        self.second = nn.Linear(24, 24, dtype=torch.float16)
        self.tied = nn.Linear(24, 24, bias=False, dtype=torch.float16)
        self.tied.weight = self.second.weight
        self.third = nn.Linear(24, 2)
        self.shift = nn.Parameter(torch.randn(6).bfloat16(), requires_grad=False)
        self.register_buffer("scale", torch.linspace(0.7, 1.3, 24).bfloat16())
        self.register_buffer("order", torch.randperm(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, 6] to [rows, 2]."""
        h = torch.tanh(self.first(x + self.shift)) * self.scale
        return self.third(torch.relu(self.tied(self.second(h)))[:, self.order])


def mixed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Mixed()


@pytest.mark.long
def test_half_precision_weights_train_as_float32_model(tmp_path):
    from dataclasses import replace

    def source(seed: int) -> ModelSource:
        return ModelSource.from_module(
            mixed(seed),
            loss=mean_squared_error,
            inputs={"x": InputSpec((6,))},
            targets={"y": InputSpec((2,))},
        )

    case = replace(PERCEPTRON, build=lambda: Mixed().float(), source=source)
    assert_same_training(streamed(case, Recipe(), tmp_path), case, Recipe())


def test_masters_equal_half_precision_weights_exactly(tmp_path):
    module, said = mixed(3), []
    source = ModelSource.from_module(
        module,
        loss=mean_squared_error,
        inputs={"x": InputSpec((6,))},
        targets={"y": InputSpec((2,))},
    )
    trainer = Trainer(
        Recipe().config(tmp_path),
        model=source,
        source=PERCEPTRON.data(0),
        on_event=lambda event: said.append(event.text) if isinstance(event, Notice) else None,
    )
    for name, parameter in module.named_parameters():
        assert torch.equal(trainer.store.master(name), parameter.detach().float()), name
    assert module.first.weight.dtype == torch.bfloat16  # the module itself stays as it was
    assert said == [
        "5 of the 7 weights given are bfloat16 and float16: the store begins with exactly their "
        "values, those that train as float32 masters"
    ]


@pytest.mark.long
def test_a_checkpoint_loaded_in_bfloat16_trains_as_in_float32(tmp_path):
    """`AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16)`, as documented."""
    from dataclasses import replace

    case = language_model("llama")
    folder = save(case.plain(5).to(torch.bfloat16), tmp_path / "hf")

    def load() -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    case = replace(
        case,
        build=lambda: load().float(),
        source=lambda seed: ModelSource.from_module(load()),
    )
    recipe = Recipe(steps=6)
    assert_same_training(streamed(case, recipe, tmp_path / "run"), case, recipe)


def spoilt(weight: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        weight.view(-1)[3:6] = value


def test_non_finite_module_weights_are_refused_by_name(tmp_path):
    module = Perceptron()
    spoilt(module.second.weight, math.nan)
    with pytest.raises(ConfigError) as caught:
        Trainer(
            Recipe().config(tmp_path),
            model=ModelSource.from_module(
                module,
                loss=mean_squared_error,
                inputs={"x": InputSpec((6,))},
                targets={"y": InputSpec((2,))},
            ),
            source=PERCEPTRON.data(0),
        )
    assert str(caught.value) == (
        "Perceptron: second.weight: 3 of its 960 values are NaN or infinite, and no run can start "
        "from them; repair the module's weights"
    )


@pytest.mark.parametrize(("value", "dtype"), [(math.nan, "float32"), (math.inf, "bfloat16")])
def test_non_finite_checkpoint_weights_are_refused_by_name(value, dtype, tmp_path):
    from dataclasses import replace

    case = language_model("llama")
    model = case.plain(0).to(getattr(torch, dtype))
    spoilt(model.model.layers[1].mlp.up_proj.weight, value)
    folder = save(model, tmp_path / "hf")
    case = replace(case, source=lambda seed: ModelSource.from_hf(folder))
    with pytest.raises(ConfigError) as caught:
        trainer_of(case, Recipe(), tmp_path / "run")
    assert str(caught.value) == (
        f"{folder}/model.safetensors: 'model.layers.1.mlp.up_proj.weight': 3 of its 1,536 values "
        "are NaN or infinite, and no run can start from them; download the folder again, or take "
        "a checkpoint from before they appeared"
    )
