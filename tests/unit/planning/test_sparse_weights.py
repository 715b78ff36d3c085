"""Which weights of a run are sparse, with how many entries, and what is refused."""

import math

import pytest
import torch
from hf_folders import model_of, rewrite, save
from tiny_models import FIELDS

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.models import ModelSource, OpenedFolder
from penstock.planning import model_sources, selected_weights
from penstock.planning.sparse_weights import plan_sparse_weights
from penstock.sparsity import MaskSize

STEPS = 1000


def gpt2(**changes):
    return ModelSource.from_hf_config({"model_type": "gpt2", **FIELDS["gpt2"], **changes})


def plan(source=None, recorded=None, steps=STEPS, **keys):
    source = source or gpt2()
    sections = {name: keys.pop(name) for name in ("freeze", "lora") if name in keys}
    model = {"hf": "somewhere"} if keys.get("initial_mask") == "zeros" else "tiny"
    config = Config.from_mapping(
        {"model": model, "sparsity": keys, "run": {"steps": steps}, **sections}
    )
    source = model_sources.with_adapters(source, config.lora)
    return plan_sparse_weights(
        config, source, selected_weights.trained_weights(config, source), recorded
    )


def test_a_run_without_a_method_has_no_sparse_weights():
    assert plan() is None


@pytest.mark.parametrize("method", ["static", "set", "rigl"])
def test_products_of_the_blocks_are_sparse_by_default(method):
    found = plan(method=method, sparsity=0.9)
    assert set(found.shapes) == {
        f"transformer.h.{block}.{name}.weight"
        for block in (0, 1)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    for name, shape in found.shapes.items():
        assert found.kept[name] == math.floor(0.1 * math.prod(shape) + 0.5)
    assert found.capacities == found.kept


def test_gradual_pruning_has_room_for_the_sparsity_of_its_start():
    everything = plan(method="gmp", sparsity=0.9)
    assert everything.capacities == everything.elements
    half = plan(method="gmp", sparsity=0.9, schedule={"initial": 0.5})
    assert half.capacities == {name: count // 2 for name, count in half.elements.items()}


def test_lifted_masks_have_room_for_every_element():
    found = plan(method="rigl", sparsity=0.9, densify_at=0.5)
    assert found.capacities == found.elements
    assert sum(found.kept.values()) == pytest.approx(0.1 * sum(found.elements.values()), rel=0.001)


def test_erdos_renyi_kernel_keeps_as_many_in_all():
    found = plan(method="static", sparsity=0.75, distribution="erdos_renyi_kernel")
    share = sum(found.kept.values()) / sum(found.elements.values())
    assert share == pytest.approx(0.25, abs=0.001)
    densities = {found.kept[n] / e for n, e in found.elements.items()}
    assert len(densities) > 1


def test_reachable_sparsities_are_those_of_a_simulated_run():
    found = plan(method="gmp", sparsity=0.9, schedule={"begin": 100, "end": 700}, densify_at=900)
    kept = dict(found.kept)
    seen = {name: {1 - n / found.elements[name]} for name, n in kept.items()}
    for step in range(1, STEPS + 1):
        sizes = {name: MaskSize(found.elements[name], n) for name, n in kept.items()}
        update = found.policy.at(step, sizes)
        for change in update.changes if update else ():
            kept[change.weight] += change.grow - change.drop
        for name, count in kept.items():
            seen[name].add(1 - count / found.elements[name])
    reachable = found.reachable_sparsities(STEPS)
    assert {name: set(values) for name, values in reachable.items()} == seen
    assert all(min(values) == 0 and max(values) > 0.89 for values in reachable.values())


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "static"},
        {"method": "set", "update_every": 7},
        {"method": "set", "update_begin": 30, "update_every": 7},
        {"method": "rigl"},
        {"method": "rigl", "update_every": 751},
        {"method": "rigl", "update_every": 750},
        {"method": "gmp", "update_every": 10_000},
        {"method": "gmp", "schedule": {"begin": 0}},
        {"method": "gmp", "schedule": {"begin": 0, "end": 0, "name": "constant"}},
        {"method": "gmp", "schedule": {"begin": 0, "end": 0, "name": "constant"}, "densify_at": 1},
        {"method": "static", "densify_at": 12},
        {"method": "rigl", "densify_at": 12},
        {"method": "rigl", "densify_at": 500},
    ],
)
def test_first_change_is_the_first_step_with_a_change(keys):
    found = plan(sparsity=0.9, **keys)
    sizes = {name: MaskSize(e, found.kept[name]) for name, e in found.elements.items()}
    changes = (step for step in range(1, STEPS + 1) if found.policy.at(step, sizes))
    assert found.first_change(STEPS) == next(changes, None)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"weights": ["*.nothing.*"]},
            r"sparsity\.weights: .*'\*\.nothing\.\*'",
        ),
        (
            {"weights": ["*.ln_1.*"]},
            r"sparsity\.weights: expected patterns of weights of two dimensions or more",
        ),
        (
            {"keep_dense": ["*"]},
            r"sparsity: expected at least one sparse weight, got none of ",
        ),
        (
            {"sparsity": 0.99999},
            r"sparsity: the mask of transformer\.h\.0\.attn\.c_attn\.weight would keep no entry",
        ),
        (
            {"method": "gmp", "sparsity": 0.99999},
            r"sparsity: the mask of transformer\.h\.0\.attn\.c_attn\.weight would keep no entry",
        ),
        (
            {"weights": ["*.h.0.*"], "freeze": ["*.h.0.attn.c_proj.*"]},
            r"^sparsity\.weights: expected weights that are trained, got "
            r"transformer\.h\.0\.attn\.c_proj\.weight, which freeze, train or lora exclude; name "
            r"them in sparsity\.keep_dense, or train them$",
        ),
    ],
)
def test_refused_selections(keys, expected):
    with pytest.raises(ConfigError, match=expected):
        plan(**{"method": "static", "sparsity": 0.9, **keys})


def test_frozen_weights_are_dense_by_default():
    found = plan(method="static", sparsity=0.9, freeze=["*.h.0.*"])
    assert all(name.startswith("transformer.h.1.") for name in found.shapes)


@pytest.fixture(scope="module")
def half_zero(tmp_path_factory):
    """A folder in which every other entry of block 0's products is zero; block 1 has no zero."""

    def prune(tensors):
        for name, weight in tensors.items():
            if ".h.0." in name and weight.dim() == 2:
                weight.view(-1)[::2] = 0

    return rewrite(save(model_of("gpt2"), tmp_path_factory.mktemp("half")), prune)


def test_zeros_of_a_checkpoint_become_masks(half_zero):
    found = plan(ModelSource.from_hf(half_zero), method="static", initial_mask="zeros")
    assert set(found.shapes) == {
        f"transformer.h.0.{name}.weight"
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert found.kept == {name: count // 2 for name, count in found.elements.items()}
    rule = found.mask_rule(ModelSource.from_hf(half_zero), seed=0)
    name, shape = next(iter(found.shapes.items()))
    ((_, values),) = ModelSource.from_hf(half_zero).initial_weights(0, [name])
    flat = values.flatten().numpy()
    assert (rule.initial(name, shape, flat).mask() == (flat != 0)).all()


def test_a_checkpoint_of_another_sparsity_is_refused(half_zero):
    source = ModelSource.from_hf(half_zero)
    keys = {"method": "static", "initial_mask": "zeros"}
    assert plan(source, sparsity=0.5, **keys) == plan(source, **keys)
    with pytest.raises(ConfigError) as raised:
        plan(source, sparsity=0.9, **keys)
    assert str(raised.value) == (
        "sparsity.sparsity: expected 0.5, the sparsity of the 4 weights with zeros in "
        f"{half_zero}, got 0.9; leave it out to keep theirs, or choose initial_mask: magnitude to "
        "prune them to another one"
    )


def test_a_checkpoint_without_zeros_is_refused(half_zero):
    with pytest.raises(ConfigError, match=r"^sparsity\.initial_mask: expected weights with zeros"):
        plan(
            ModelSource.from_hf(half_zero),
            method="static",
            initial_mask="zeros",
            keep_dense=["*.h.0.*"],
        )


def test_a_weight_of_zeros_is_refused(half_zero, tmp_path):
    folder = save(model_of("gpt2"), tmp_path)

    def clear(tensors):
        tensors["transformer.h.0.mlp.c_fc.weight"].zero_()

    rewrite(folder, clear)
    with pytest.raises(ConfigError, match=r"mask of transformer\.h\.0\.mlp\.c_fc\.weight would"):
        plan(ModelSource.from_hf(folder), method="static", initial_mask="zeros")


def test_a_resumed_run_keeps_the_recorded_numbers(half_zero):
    opened = OpenedFolder.without_weights(half_zero, {})  # as a resumed run has it
    random = ModelSource.from_opened_folder(opened)
    recorded = {"transformer.h.0.mlp.c_fc.weight": 77}
    found = plan(random, recorded=recorded, method="static", initial_mask="zeros")
    assert found.kept == found.capacities == recorded
    with pytest.raises(ConfigError, match="the run has sparse weights that gpt2 lacks: other"):
        plan(random, recorded={"other": 1}, method="static", initial_mask="zeros")


def test_kept_zeros_of_a_packed_checkpoint_stay(tmp_path, half_zero):
    from safetensors.torch import load_file, save_file

    from penstock.training import prune_model

    prune_model(half_zero, tmp_path / "packed", 0.9, packed=True)
    file = tmp_path / "packed" / "model.packed.safetensors"
    tensors = load_file(file)
    name = "transformer.h.0.mlp.c_fc.weight"
    tensors[f"{name}.packed_values"][:5] = 0
    save_file(tensors, file)
    source = ModelSource.from_hf(tmp_path / "packed")
    found = plan(source, method="static", initial_mask="zeros")
    assert found.kept[name] == len(tensors[f"{name}.packed_values"])
    ((_, values),) = source.initial_weights(0, [name])
    assert int(torch.count_nonzero(values)) == found.kept[name] - 5
    rule = found.mask_rule(source, seed=0)
    index = rule.initial(name, found.shapes[name], values.flatten().numpy())
    assert index.kept == found.kept[name]
