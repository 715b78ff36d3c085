"""The store in host memory trains as a plain PyTorch loop does, whatever its layout."""

import threading

import numpy as np
import pytest
import torch
from store_programs import (
    LAYERS,
    forward_sweep,
    make_program,
    random_gradients,
    random_weights,
    send,
    train,
    training_store,
)

from penstock.errors import ConfigError, NonFiniteError, NoTrainingError
from penstock.store import (
    SGD,
    CommitRule,
    DramStore,
    Group,
    Lion,
    Schedule,
    Traffic,
    assign_groups,
    learning_rate,
)


def loaded(program, seed=0, **settings):
    store = training_store(program, **settings)
    store.load(random_weights(program, seed).items())
    return store


def masters(store):
    return {name: store.master(name) for name in store.program.weights}


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)), name


class TorchLoop:
    """The reference: parameters, `clip_grad_norm_`, `torch.optim.AdamW`."""

    def __init__(self, program, seed, clip_norm, schedule, weight_decay=0.1):
        self.program, self.clip_norm, self.schedule = program, clip_norm, schedule
        self.weights = random_weights(program, seed)
        for name, weight in self.weights.items():
            weight.requires_grad_(program.weights[name].trainable)
        self.trained = [weight for weight in self.weights.values() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay
        )
        self.step = 0

    def train(self, gradients):
        self.optimizer.zero_grad()
        for stage in sorted(gradients, reverse=True):
            names = self.program.stages[stage].weights
            trainable = [name for name in names if self.program.weights[name].trainable]
            for name, gradient in zip(trainable, gradients[stage], strict=True):
                weight = self.weights[name]
                weight.grad = gradient.clone() if weight.grad is None else weight.grad + gradient
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.schedule, self.step)
        limit = float("inf") if self.clip_norm is None else self.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(self.trained, limit)
        self.optimizer.step()
        self.step += 1
        return norm.item()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("clip_norm", [None, 1.0, 1e6])
def test_twenty_steps_agree_with_plain_pytorch(seed, clip_norm):
    program = make_program(LAYERS, frozen=("position",))
    schedule = Schedule("linear", peak=1e-2, decay_steps=25)
    store = loaded(program, seed, clip_norm=clip_norm, schedule=schedule)
    reference = TorchLoop(program, seed, clip_norm, schedule)
    generator = np.random.default_rng(seed)
    for number in range(20):
        gradients = random_gradients(program, generator)
        forward_sweep(store)
        send(store, gradients)
        commit = store.commit()
        norm = reference.train(gradients)
        assert commit.decision.step == store.step == number + 1
        assert commit.decision.learning_rate == learning_rate(schedule, number)
        assert commit.decision.norm == pytest.approx(norm, rel=1e-6)
    for name, weight in reference.weights.items():
        np.testing.assert_allclose(
            store.master(name), weight.detach(), rtol=3e-6, atol=3e-7, err_msg=f"{name}, {seed=}"
        )
    assert torch.equal(store.master("position"), random_weights(program, seed)["position"])


@pytest.mark.parametrize("seed", range(3))
def test_split_master_trains_to_the_bits_of_a_whole_master(seed):
    whole = loaded(make_program(LAYERS), seed, clip_norm=1.0)
    halves = loaded(
        make_program(LAYERS, stream_dtype=torch.bfloat16), seed, precision="bf16", clip_norm=1.0
    )
    assert train(whole, 10, seed) == train(halves, 10, seed)
    assert_same_bits(masters(whole), masters(halves))
    assert whole.content_hash() == halves.content_hash()
    for name, streamed in forward_sweep(halves).items():
        assert streamed.dtype == torch.bfloat16
        # The nearest bfloat16: no further from the master than PyTorch's own rounding.
        master = halves.master(name)
        ours, theirs = (streamed.float() - master).abs(), (master.bfloat16() - master).abs()
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("optimizer", [SGD(), SGD(0.9, nesterov=True), Lion()])
def test_split_master_keeps_the_bits_with_every_optimizer(optimizer):
    whole = loaded(make_program(LAYERS), optimizer=optimizer)
    program = make_program(LAYERS, stream_dtype=torch.bfloat16)
    halves = loaded(program, precision="bf16", optimizer=optimizer)
    train(whole, 4, seed=1)
    train(halves, 4, seed=1)
    assert_same_bits(masters(whole), masters(halves))
    assert set(whole.state("norm")) == {role.name for role in optimizer.roles}
    assert whole.unchanged() == ()


def test_groups_scale_the_learning_rate_and_set_the_decay():
    program = make_program([{"fast": (40,), "slow": (40,), "still": (40,)}])
    groups = assign_groups(
        {name: spec.shape for name, spec in program.weights.items()},
        [Group(("slow",), learning_rate_scale=0.5, weight_decay=0.2), Group(("still",), 0.0)],
        weight_decay=0.1,
        decay_1d=True,
    )
    store = DramStore(program, "fp32", SGD(), groups, CommitRule(Schedule("constant", 1e-2)))
    weights = random_weights(program, 3)
    store.load(weights.items())
    gradient = torch.randn(40, generator=torch.Generator().manual_seed(0))
    send(store, {0: [gradient] * 3})
    store.commit()
    fast, slow = weights["fast"].double(), weights["slow"].double()
    expected = fast - 1e-2 * (gradient.double() + 0.1 * fast)
    np.testing.assert_allclose(store.master("fast"), expected, rtol=1e-6)
    expected = slow - 5e-3 * (gradient.double() + 0.2 * slow)
    np.testing.assert_allclose(store.master("slow"), expected, rtol=1e-6)
    assert torch.equal(store.master("still"), weights["still"])
    assert store.unchanged() == ()  # nobody meant it to move


def test_gradients_kept_in_bfloat16_are_rounded_once():
    program = make_program(LAYERS)
    store = loaded(program, gradient_dtype=torch.bfloat16, weight_decay=0.0)
    exact = loaded(program, weight_decay=0.0)
    gradients = random_gradients(program, np.random.default_rng(5))
    send(store, gradients)
    # What is rounded before it is sent must not change by being kept; a tied weight's parts
    # are added in float32.
    tied = {
        0: program.stages[0].weights.index("embed"),
        3: program.stages[3].weights.index("embed"),
    }
    for stage, tensors in gradients.items():
        for position, tensor in enumerate(tensors):
            if tied.get(stage) != position:
                tensors[position] = tensor.bfloat16().float()
    send(exact, gradients)
    assert store.commit() == exact.commit()
    assert_same_bits(masters(store), masters(exact))
    assert store.memory_bytes["gradient"] < exact.memory_bytes["gradient"]


def test_lazy_updates_change_no_bit():
    program = make_program(LAYERS)
    lazy, eager, looked_at = (loaded(program, clip_norm=1.0) for _ in range(3))
    for _ in range(4):
        train(lazy, 1, seed=3)
        train(eager, 1, seed=3)
        eager.flush()
        train(looked_at, 1, seed=3)
        looked_at.fetch(3)
        looked_at.fetch(1)
        looked_at.state("norm")
    assert_same_bits(masters(lazy), masters(eager))
    assert_same_bits(masters(lazy), masters(looked_at))


def test_gradient_before_fetch_does_not_overtake_the_update():
    program = make_program(LAYERS)
    patient, hasty = loaded(program), loaded(program)
    generators = [np.random.default_rng(1), np.random.default_rng(1)]
    for store, generator in zip((patient, hasty), generators, strict=True):
        for _ in range(3):
            if store is patient:
                forward_sweep(store)
            send(store, random_gradients(program, generator))
            store.commit()
    assert_same_bits(masters(patient), masters(hasty))


def test_fetch_returns_requested_weights_without_copying():
    program = make_program(LAYERS)
    store = loaded(program)
    weights = random_weights(program, 0)
    everything = store.fetch(2)
    names = program.stages[2].weights
    assert [tuple(view.shape) for view in everything] == [program.weights[n].shape for n in names]
    assert all(torch.equal(v, weights[n]) for v, n in zip(everything, names, strict=True))
    some = store.fetch(2, (2, 0))
    assert [view.data_ptr() for view in some] == [
        everything[2].data_ptr(),
        everything[0].data_ptr(),
    ]
    tied = [store.fetch(0)[0], store.fetch(3)[1]]
    assert tied[0].data_ptr() == tied[1].data_ptr()


def test_traffic_counts_weights_and_gradients():
    program = make_program(LAYERS, frozen=("position",), stream_dtype=torch.bfloat16)
    store = loaded(program, precision="bf16")
    forward_sweep(store)
    generator = np.random.default_rng(0)
    send(store, random_gradients(program, generator))
    sizes = [program.weights[n].elements for stage in program.stages for n in stage.weights]
    frozen = program.weights["position"].elements
    assert store.take_traffic() == Traffic(2 * sum(sizes), 4 * (sum(sizes) - frozen))
    store.fetch(1, (1,))
    assert store.take_traffic() == Traffic(2 * 33, 0)


def test_memory_is_exact_and_frozen_weights_have_no_gradient_or_state():
    program = make_program([{"a": (1000, 3), "b": (1 << 16,)}, {"c": (512,)}], frozen=("b",))
    store = loaded(program)
    padding = 3 * 64
    master = 4 * (3000 + 65536 + 512)
    trainable = 4 * (3000 + 512)
    assert master <= store.memory_bytes["master"] <= master + padding
    for role in ("gradient", "exp_avg", "exp_avg_sq"):
        assert trainable <= store.memory_bytes[role] <= trainable + padding
    assert store.state("b") == {}
    assert set(store.state("a")) == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("precision", "clip_norm", "advice"),
    [
        ("fp32", None, "the learning rate, set optimizer.clip_norm, or check the data"),
        ("bf16", None, "the learning rate, set optimizer.clip_norm, or check the data"),
        ("fp32", 1.0, "the learning rate or optimizer.clip_norm, or check the data"),
    ],
)
def test_a_non_finite_gradient_is_refused_and_the_step_can_be_replayed(
    bad, precision, clip_norm, advice
):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    program = make_program(LAYERS, stream_dtype=dtype)
    settings = {"precision": precision, "gradient_dtype": dtype, "clip_norm": clip_norm}
    store, steady = loaded(program, **settings), loaded(program, **settings)
    train(store, 2, seed=0)
    train(steady, 3, seed=0)
    forward_sweep(store)
    gradients = random_gradients(program, np.random.default_rng(9))
    gradients[2][0][63, 39] = bad
    gradients[1][1][0] = bad
    send(store, gradients)
    before = masters(store)
    with pytest.raises(NonFiniteError) as caught:
        store.commit()
    assert str(caught.value) == (
        "step 3 is not committed: NaN or infinity in the gradient of weight block.1.weight of "
        f"stage stage2, then of stage stage1; lower {advice}"
    )
    assert store.step == 2
    assert_same_bits(before, masters(store))
    store.discard()
    train(store, 1, seed=0)
    assert_same_bits(masters(steady), masters(store))


def test_weights_without_a_gradient_are_named():
    program = make_program(LAYERS)
    store = loaded(program)
    gradients = random_gradients(program, np.random.default_rng(0))
    gradients[1][1] = None
    gradients[0][0] = None  # `embed` still has its part from the last stage
    send(store, gradients)
    with pytest.raises(NoTrainingError) as caught:
        store.commit()
    assert str(caught.value) == (
        "step 1: no gradient for trainable weight block.0.bias: the loss does not depend on it; "
        "freeze weights that should not train, or use them in the loss"
    )
    store.discard()
    store.receive(3, gradients[3])
    with pytest.raises(NoTrainingError) as caught:
        store.commit()
    assert str(caught.value) == (
        "step 1: no gradients were received from stages stage0, stage1, stage2; every stage with "
        "trainable weights must send them before the commit"
    )
    assert store.step == 0


def test_a_commit_names_the_weights_whose_gradient_is_zero_everywhere():
    program = make_program(LAYERS)
    store = loaded(program)
    gradients = random_gradients(program, np.random.default_rng(0))
    gradients[1][1].zero_()
    for _ in range(3):
        forward_sweep(store)
        send(store, gradients)
        assert store.commit().zero_gradients == ("block.0.bias",)
    gradients[1][1][7] = 1e-30  # a single element is enough, as for the rows of an embedding
    send(store, gradients)
    assert store.commit().zero_gradients == ()


def test_update_lost_to_rounding_is_named():
    program = make_program([{"large": (8,), "small": (8,)}])
    store = training_store(program, schedule=Schedule("constant", 1e-9), weight_decay=0.0)
    store.load([("large", torch.full((8,), 1e6)), ("small", torch.zeros(8))])
    send(store, {0: [torch.ones(8), torch.ones(8)]})
    store.commit()
    store.flush()
    assert store.unchanged() == ("large",)


def test_invalid_gradients_are_refused():
    program = make_program(LAYERS)
    store = loaded(program)
    gradients = random_gradients(program, np.random.default_rng(0))
    with pytest.raises(ValueError, match="each of 2 trainable weights, got 1 gradients"):
        store.receive(1, gradients[1][:1])
    with pytest.raises(
        ValueError,
        match=r"expected float32 \[33\] as the gradient of block.0.bias, got torch.float32 \[3",
    ):
        store.receive(1, [gradients[1][0], torch.zeros(34)])
    with pytest.raises(ValueError, match="expected float32"):
        store.receive(1, [gradients[1][0].double(), gradients[1][1]])
    store.receive(1, gradients[1])
    with pytest.raises(RuntimeError, match="stage stage1 has sent its gradients twice"):
        store.receive(1, gradients[1])


def test_threads_fetch_and_send_different_stages_concurrently():
    program = make_program([{f"w{i}": (300 + i, 300)} for i in range(8)])
    alone, together = loaded(program), loaded(program)
    train(alone, 3, seed=4)
    for _ in range(3):
        gradients = random_gradients(program, np.random.default_rng([4, together.step]))
        problems = []

        def work(stage, gradients=gradients, problems=problems):
            try:
                together.fetch(stage)
                together.receive(stage, gradients[stage])
            except Exception as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(stage,)) for stage in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        together.commit()
    assert_same_bits(masters(alone), masters(together))


def test_second_load_resets_the_store():
    program = make_program(LAYERS)
    store, fresh = loaded(program, 1), loaded(program, 2)
    train(store, 3, seed=0)
    store.load(random_weights(program, 2).items())
    assert store.step == 0
    assert train(store, 3, seed=7) == train(fresh, 3, seed=7)
    assert_same_bits(masters(store), masters(fresh))


def test_weights_of_another_program_are_refused():
    program = make_program(LAYERS)
    weights = random_weights(program, 0)
    store = training_store(program)
    with pytest.raises(RuntimeError, match="holds no weights yet"):
        store.fetch(0)
    for change, message in (
        ({"nrom": torch.zeros(16)}, "small has no weight 'nrom' (did you mean 'norm'?)"),
        (
            {"norm": torch.zeros(17)},
            "weight 'norm': expected float32 [16], got torch.float32 [17]",
        ),
        (
            {"norm": torch.zeros(16).bfloat16()},
            "weight 'norm': expected float32 [16], got torch.bfloat16 [16]",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            store.load((weights | change).items())
        assert str(caught.value) == message
    with pytest.raises(ConfigError, match="every weight of small; 2 were not given: embed, norm"):
        store.load((n, w) for n, w in weights.items() if n not in ("embed", "norm"))
    with pytest.raises(ConfigError, match="weight 'embed' was given twice"):
        store.load([("embed", weights["embed"])] * 2)
    with pytest.raises(RuntimeError, match="holds no weights yet"):
        store.fetch(0)
    store.load(weights.items())
    assert_same_bits(masters(store), weights)


def test_content_hash_depends_on_every_bit_and_nothing_else():
    weights = random_weights(make_program(LAYERS), 0)

    def hash_of(layers, weights, **settings):
        store = DramStore(make_program(layers, **settings), "bf16")
        store.load(weights.items())
        return store.content_hash()

    usual = hash_of(LAYERS, weights)
    merged = [{name: shape for layer in LAYERS for name, shape in layer.items()}]
    assert hash_of(merged, weights) == usual
    assert hash_of(LAYERS, weights, stream_dtype=torch.bfloat16) == usual
    flipped = {name: weight.clone() for name, weight in weights.items()}
    flipped["norm"].view(torch.int32)[15] ^= 1
    assert hash_of(LAYERS, flipped) != usual


def test_a_store_without_an_optimizer_only_streams():
    program = make_program(LAYERS)
    store = DramStore(program, "fp32")
    store.load(random_weights(program, 0).items())
    assert set(store.memory_bytes) == {"master"}
    assert forward_sweep(store).keys() == program.weights.keys()
    with pytest.raises(RuntimeError, match="has no optimizer"):
        store.receive(0, [])


def test_the_precision_must_be_that_of_the_program():
    program = make_program(LAYERS, stream_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"embed streams as torch.bfloat16, the precision is fp32"):
        DramStore(program, "fp32")
    with pytest.raises(ValueError, match="precision must be 'fp32' or 'bf16', not 'fp8'"):
        DramStore(program, "fp8")


def test_streaming_by_name_is_counted():
    program = make_program(LAYERS)
    store = loaded(program)
    train(store, 1, seed=0)
    twin = loaded(program)
    train(twin, 1, seed=0)
    store.take_traffic()
    views = store.stream(["norm", "position"])
    assert all(
        torch.equal(v, twin.master(n)) for v, n in zip(views, ("norm", "position"), strict=True)
    )
    traffic = store.take_traffic()
    assert (traffic.streamed_bytes, traffic.gradient_bytes) == (4 * (16 + 7 * 16), 0)
