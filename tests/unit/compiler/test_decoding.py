"""Incremental decoding: each position computed from the keys and values of those before it."""

import pytest
import torch
from grids import quick_first
from tiny_models import FIELDS, LENGTH, VOCABULARY, deepseek, language_model

from penstock.compiler import CACHE, POSITION
from penstock.engine import Batch, EnginePlan, TorchEngine, compute
from penstock.models import ModelSource
from penstock.planning import builders
from penstock.step_schedule import StepSchedule
from penstock.training.next_token import NextToken

START = 5
SLIDING = {
    "sliding_window": 4,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
ATTENTION = {
    "mistral": SLIDING,
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 8},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"num_attention_heads": 4},
}
EQUAL_SIZES = {"hidden_size": LENGTH, "intermediate_size": LENGTH, "num_attention_heads": LENGTH}


def program_of(source, goal, precision="fp32"):
    return builders.compile_source(
        source, micro_batch=1, length=LENGTH, precision=precision, goal=goal
    )


def weights_for(program, plain):
    named = dict(plain.named_parameters())
    return {n: named[n].detach().to(w.stream_dtype) for n, w in program.weights.items()}


def logits_of_window(source, weights, ids, precision="fp32"):
    engine = TorchEngine(program_of(source, "logits", precision), EnginePlan())
    engine.begin(Batch([{"input_ids": ids}], 0, 1, 0, 0))
    for operation in StepSchedule.forward_only(engine.program).operations:
        engine.load(operation.stage, [weights[n] for n in operation.weights])
        compute(engine, operation)
    return engine.results()[0][0][0]


def check(source, plain, precision="fp32", tolerance=2e-6):
    """Compare the logits of each position with those of the whole window; return the goals of the
    programs that were compiled."""
    weights = weights_for(program_of(source, "logits", precision), plain)
    goals = []

    def make_engine(goal):
        goals.append(goal)
        return TorchEngine(program_of(source, goal, precision), EnginePlan())

    ids = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(3))
    wanted = logits_of_window(source, weights, ids, precision)
    following = NextToken(make_engine, lambda names: [weights[n] for n in names], LENGTH)
    text = ids[0].tolist()
    scale = wanted.abs().max()
    for end in range(START, LENGTH + 1):
        found = following.logits(text[:end])
        assert (found - wanted[end - 1]).abs().max() <= tolerance * scale, end
    return goals


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", quick_first(sorted(FIELDS.keys() - {"bert"}), ["gpt2", "llama"]))
def test_each_position_has_the_logits_of_the_whole_window(family, precision):
    case = language_model(family)
    tolerance = 2e-6 if precision == "fp32" else 2e-2
    goals = check(case.source(0), case.plain(0).eval(), precision, tolerance)
    assert goals == ["prefill", "decode"]


@pytest.mark.parametrize("changes", [EQUAL_SIZES, {"num_key_value_heads": 4}])
def test_sizes_that_equal_the_window(changes):
    case = language_model("llama", **changes)
    assert check(case.source(0), case.plain(0).eval()) == ["prefill", "decode"]


def plain_and_source(model_type, fields):
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    fields = {**known, **ends, **fields}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return plain, ModelSource.from_hf_config({"model_type": model_type, **fields})


@pytest.mark.parametrize("model_type", quick_first(sorted(ATTENTION), ["mistral"]))
def test_masks_and_biases_of_attention(model_type):
    plain, source = plain_and_source(model_type, ATTENTION[model_type])
    assert check(source, plain) == ["prefill", "decode"]


def test_latent_attention_with_experts():
    case = deepseek()
    check(case.source(0), case.plain(0).eval(), tolerance=1e-5)


def test_recurrent_layers_compute_the_window_for_each_token():
    plain, source = plain_and_source("mamba", {"state_size": 4})
    assert check(source, plain, tolerance=1e-5) == ["prefill"]


def test_keys_are_kept_once_for_the_heads_that_share_them():
    program = program_of(language_model("llama").source(0), "decode")
    shape = program.values[CACHE.format(0)].tensor.shape
    assert shape == (1, 2, LENGTH, 8)
    assert program.values[POSITION].tensor.shape == (1,)


def test_another_text_does_not_see_the_last_one():
    case = language_model("gpt2")
    source, plain = case.source(0), case.plain(0).eval()
    weights = weights_for(program_of(source, "logits"), plain)

    def make_engine(goal):
        return TorchEngine(program_of(source, goal), EnginePlan())

    def fetch(names):
        return [weights[n] for n in names]

    used = NextToken(make_engine, fetch, LENGTH)
    for text in ([1, 2, 3], [1, 2, 3, 4], [9, 8, 7, 6, 5], [1, 2], list(range(LENGTH + 3))):
        fresh = NextToken(make_engine, fetch, LENGTH).logits(text)
        assert torch.allclose(used.logits(text), fresh, rtol=0, atol=2e-6), text


def test_a_token_is_written_into_the_kept_keys_and_nothing_is_copied():
    case = language_model("gpt2")
    source, plain = case.source(0), case.plain(0).eval()
    weights = weights_for(program_of(source, "logits"), plain)
    following = NextToken(
        lambda goal: TorchEngine(program_of(source, goal), EnginePlan()),
        lambda names: [weights[n] for n in names],
        LENGTH,
    )
    following.logits([1, 2, 3])
    kept = [(tensor.data_ptr(), tensor.clone()) for tensor in following._kept]
    assert len(kept) == 2 * 2
    following.logits([1, 2, 3, 4])
    for now, (address, before) in zip(following._kept, kept, strict=True):
        assert now.data_ptr() == address
        changed = (now != before).flatten(0, 1).any(dim=2).any(dim=0)
        assert changed.nonzero().flatten().tolist() == [3]


def test_weights_that_have_changed_between_two_tokens():
    case = language_model("gpt2")
    source, plain = case.source(0), case.plain(0).eval()
    weights = weights_for(program_of(source, "logits"), plain)
    version = 0

    def make_engine(goal):
        return TorchEngine(program_of(source, goal), EnginePlan())

    def fetch(names):
        return [weights[n] * (1 + version) for n in names]

    used = NextToken(make_engine, fetch, LENGTH, lambda: version)
    before = used.logits([1, 2, 3])
    version = 1
    fresh = NextToken(make_engine, fetch, LENGTH, lambda: version)
    assert torch.equal(used.logits([1, 2, 3, 4]), fresh.logits([1, 2, 3, 4]))
    assert not torch.allclose(before, fresh.logits([1, 2, 3]))
