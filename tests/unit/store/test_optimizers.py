"""Optimizers by name, and which weight trains with which settings."""

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError
from penstock.kernels.split_master import join, split
from penstock.store.optimizers import Group, GroupSettings, assign_groups, make_optimizer

WEIGHTS = {
    "embed.weight": (100, 8),
    "h.0.attn.weight": (8, 8),
    "h.0.attn.bias": (8,),
    "h.1.attn.weight": (8, 8),
    "h.1.attn.bias": (8,),
    "norm.weight": (8,),
}
KINDS = [
    ("adamw", {"beta2": 0.95, "epsilon": 1e-6}, ("exp_avg", "exp_avg_sq")),
    ("sgd", {}, ()),
    ("sgd", {"momentum": 0.9}, ("momentum",)),
    ("sgd", {"momentum": 0.9, "nesterov": True}, ("momentum",)),
    ("lion", {}, ("exp_avg",)),
]


def assigned(groups, weight_decay=0.1, decay_1d=False):
    return assign_groups(WEIGHTS, groups, weight_decay=weight_decay, decay_1d=decay_1d)


@pytest.mark.parametrize(("name", "hyper", "roles"), KINDS)
def test_roles_are_the_used_state(name, hyper, roles):
    optimizer = make_optimizer(name, **hyper)
    assert tuple(role.name for role in optimizer.roles) == roles
    state = {role: np.zeros(33, np.float32) for role in roles}
    weight = np.ones(33, np.float32)
    optimizer.update(
        (weight,), np.ones(33, np.float32), state, step=1, learning_rate=0.1, weight_decay=0.0
    )
    assert (weight < 1).all()
    assert all(array.all() for array in state.values())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("name", "hyper", "reference"),
    [
        (
            "adamw",
            {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6},
            lambda p, **k: torch.optim.AdamW(p, betas=(0.8, 0.95), eps=1e-6, **k),
        ),
        ("sgd", {}, torch.optim.SGD),
        ("sgd", {"momentum": 0.9}, lambda p, **k: torch.optim.SGD(p, momentum=0.9, **k)),
        (
            "sgd",
            {"momentum": 0.9, "nesterov": True},
            lambda p, **k: torch.optim.SGD(p, momentum=0.9, nesterov=True, **k),
        ),
    ],
)
def test_clipped_run_on_split_master_equals_pytorch(name, hyper, reference, seed):
    generator = np.random.default_rng(seed)
    master = generator.standard_normal(501).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(master.copy()))
    theirs = reference([parameter], lr=1e-2, weight_decay=0.1)
    high, low = np.empty(501, np.uint16), np.empty(501, np.uint16)
    split(master, high, low)
    ours = make_optimizer(name, **hyper)
    state = {role.name: np.zeros(501, np.float32) for role in ours.roles}
    for step in range(1, 11):
        gradient = generator.standard_normal(501).astype(np.float32)
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
        parameter.grad = torch.from_numpy(gradient.copy())
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        theirs.step()
        ours.update(
            (high, low),
            gradient,
            state,
            step=step,
            learning_rate=1e-2,
            weight_decay=0.1,
            gradient_scale=1.0 / (norm + 1e-6),
        )
    join(high, low, master)
    np.testing.assert_allclose(master, parameter.detach().numpy(), rtol=2e-6, atol=2e-6)


def test_the_first_group_that_matches_wins():
    settings = assigned(
        [
            Group(("h.0.*",), learning_rate_scale=0.5),
            Group(("h.*.weight", "embed.*"), learning_rate_scale=2.0, weight_decay=0.3),
        ]
    )
    assert settings == {
        "embed.weight": GroupSettings(2.0, 0.3, 1),
        "h.0.attn.weight": GroupSettings(0.5, 0.1, 0),
        "h.0.attn.bias": GroupSettings(0.5, 0.0, 0),
        "h.1.attn.weight": GroupSettings(2.0, 0.3, 1),
        "h.1.attn.bias": GroupSettings(1.0, 0.0, None),
        "norm.weight": GroupSettings(1.0, 0.0, None),
    }
    assert list(settings) == list(WEIGHTS)


def test_one_dimensional_weights_decay_only_if_configured():
    assert assigned([])["norm.weight"].weight_decay == 0.0
    assert assigned([], decay_1d=True)["norm.weight"].weight_decay == 0.1
    named = assigned([Group(("norm.*",), weight_decay=0.2)])
    assert named["norm.weight"].weight_decay == 0.2


TIED = {"embed.weight": ("head.weight",)}


def test_group_matches_the_second_name_of_a_tied_weight():
    groups = [Group(("head.*",), learning_rate_scale=0.5), Group(("*",), weight_decay=0.0)]
    settings = assign_groups(WEIGHTS, groups, weight_decay=0.1, decay_1d=False, aliases=TIED)
    assert settings["embed.weight"] == GroupSettings(0.5, 0.1, 0)


def test_groups_that_split_the_names_of_a_tied_weight_are_refused():
    groups = [Group(("embed.*",)), Group(("head.*", "norm.*"))]
    with pytest.raises(ConfigError) as caught:
        assign_groups(WEIGHTS, groups, weight_decay=0.1, decay_1d=False, aliases=TIED)
    assert str(caught.value) == (
        "embed.weight and head.weight are one weight, but optimizer group 1 matches the one name "
        "and group 2 the other; let one group match both names, or remove one of the names"
    )


def test_name_patterns_are_case_sensitive():
    with pytest.raises(ConfigError, match="matches none"):
        assigned([Group(("NORM.*",))])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [Group(("norm.weigth",))],
            "optimizer group 1 ('norm.weigth') matches none of the 6 trainable weights "
            "(did you mean 'norm.weight'?); correct the pattern or remove the group",
        ),
        (
            [Group(("*",)), Group(("*.bias", "norm.*"))],
            "optimizer group 2 ('*.bias', 'norm.*') gets no weight: earlier groups match all of "
            "its weights; move it up",
        ),
        (
            [Group(("*.bais",))],
            "optimizer group 1 ('*.bais') matches none of the 6 trainable weights "
            "(did you mean '*.bias'?); correct the pattern or remove the group",
        ),
        (
            [Group(("zzz",))],
            "optimizer group 1 ('zzz') matches none of the 6 trainable weights; "
            "correct the pattern or remove the group",
        ),
    ],
)
def test_a_group_without_weights_is_refused_by_name(groups, message):
    with pytest.raises(ConfigError) as caught:
        assigned(groups)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_optimizer("adam"),
            "optimizer 'adam' is not known (did you mean 'adamw'?); choose one of adamw, sgd, lion",
        ),
        (
            lambda: make_optimizer("adamw", beta_1=0.9),
            "adamw has no setting 'beta_1' (did you mean 'beta1'?); it has beta1, beta2, epsilon, "
            "moments",
        ),
        (
            lambda: make_optimizer("lion", beta1=1.0),
            "lion: beta1 must be at least 0 and below 1, got 1.0",
        ),
        (
            lambda: make_optimizer("sgd", nesterov=True),
            "sgd: nesterov needs a momentum above 0; set momentum or drop it",
        ),
        (lambda: Group(()), "optimizer group (): expected a list of one or more name patterns"),
        (
            lambda: Group(("*",), weight_decay=-1.0),
            "optimizer group ('*',): weight_decay must be 0 or more, got -1.0",
        ),
    ],
)
def test_invalid_settings_are_refused(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == message
