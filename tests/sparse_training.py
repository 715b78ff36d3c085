"""Training of sparse weights: stores of small programs, and a masked dense reference in NumPy.

The reference holds every weight and every moment as a dense float64 array: gradients, weights and
moments of absent entries are zeroed by a bool mask. It counts the updates of every entry by itself
(an entry that regrows starts at 0), sorts magnitudes to choose entries, and uses nothing of
`penstock` but the run's seeds.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from random_masks import first_of
from store_programs import CONSTANT, make_program, random_weights, training_store

from penstock.sparsity import (
    ChangeTimes,
    Densify,
    DropFraction,
    GradualMagnitude,
    RigL,
    SparseEvolutionaryTraining,
    SparseWeight,
    SparsitySchedule,
    StaticMasks,
)
from penstock.store import SGD, AdamW, Lion, MaskRule

LAYERS = (
    {"embed": (50, 16), "position": (7, 16)},
    {"block.0.weight": (130, 70), "block.0.bias": (130,)},
    {"block.1.weight": (64, 40), "block.1.scale": ()},
    {"norm": (16,), "embed": (50, 16)},
)
"""`block.0.weight` has three granules; `embed` is tied and sparse; `position` is not trained."""

SPARSE = ("embed", "block.0.weight", "block.1.weight")
DENSITY = {"embed": 0.4, "block.0.weight": 0.1, "block.1.weight": 0.25}
SEED, CLIP, DECAY = 17, 30.0, 0.1
TIMES, FRACTION = ChangeTimes(3, 15, 4), DropFraction(0.3, 18)  # changes at 3, 7, 11 and 15
PRUNING = ChangeTimes(4, 14, 3)  # changes at 4, 7, 10, 13 and, at the end, 14

OPTIMIZERS = {
    "adamw": AdamW(0.9, 0.95, 1e-8),
    "adamw 8bit": AdamW(0.9, 0.95, 1e-8, moments="8bit"),
    "sgd": SGD(),
    "momentum": SGD(0.9, nesterov=True),
    "momentum 8bit": SGD(0.9, moments="8bit"),
    "lion": Lion(),
    "lion 8bit": Lion(moments="8bit"),
}
METHODS = ("static", "gmp", "set", "rigl", "densify", "densify rigl")


def elements_of(name):
    """The number of elements of a weight."""
    return math.prod(next(layer[name] for layer in LAYERS if name in layer))


def policy_of(method):
    """The policy of a method."""
    exchange = {"set": SparseEvolutionaryTraining, "rigl": RigL}
    if method in exchange:
        return exchange[method](TIMES, FRACTION)
    if method == "gmp":
        return GradualMagnitude(
            {n: SparsitySchedule("power", 1 - DENSITY[n], 0.1, 4, 14) for n in SPARSE}, PRUNING
        )
    if method.startswith("densify"):
        return Densify(policy_of(method.removeprefix("densify ").replace("densify", "static")), 9)
    return StaticMasks()


def rule_of(method, initial_mask="random"):
    """The rule of a method's masks."""
    starts = dict.fromkeys(SPARSE, 0.9) if method == "gmp" else DENSITY
    return MaskRule(policy_of(method), SEED, initial_mask, starts)


def sparse_program(method, precision="fp32", frozen=("position",)):
    """A program in which the weights of `SPARSE` have the capacity that a method needs."""
    starts = {} if method.startswith("densify") else rule_of(method).densities
    capacity = {n: math.floor(elements_of(n) * starts.get(n, 1) + 0.5) for n in SPARSE}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return make_program(LAYERS, frozen=frozen, stream_dtype=dtype, sparse=capacity)


def sparse_store(method, optimizer="adamw", precision="fp32", **settings):
    """A store of such a program, loaded with random weights."""
    program = sparse_program(method, precision)
    store = empty_store(program, method, optimizer, precision, **settings)
    store.load(random_weights(program, 5).items())
    return store


def empty_store(program, method, optimizer="adamw", precision="fp32", **settings):
    """A store of such a program, before anything is loaded."""
    return training_store(
        program,
        precision,
        optimizer=OPTIMIZERS[optimizer],
        clip_norm=CLIP,
        weight_decay=DECAY,
        masks=rule_of(method),
        **settings,
    )


def dense_gradients(program, step):
    """Random gradients of every stage as dense arrays; a weight used twice gets two."""
    generator = np.random.default_rng([3, step])
    return {
        stage.index: {
            name: generator.standard_normal(program.weights[name].shape).astype(np.float32)
            for name in stage.weights
            if program.weights[name].trainable
        }
        for stage in program.stages
    }


def streamed(store):
    """Fetch every stage once; return what came, by weight."""
    return {
        name: weight
        for stage in store.program.stages
        for name, weight in zip(stage.weights, store.fetch(stage.index), strict=True)
    }


def send_dense(store, gradients, weights=None):
    """Send gradients as an engine does: those of a sparse weight as the fetch asked for them."""
    weights = weights or streamed(store)
    for stage in sorted(gradients, reverse=True):
        sent = []
        for name, gradient in gradients[stage].items():
            weight = weights[name]
            if isinstance(weight, SparseWeight) and not weight.dense_gradient:
                gradient = gradient.reshape(-1)[weight.index.positions()]
            sent.append(torch.from_numpy(np.asarray(gradient)))
        if sent:
            store.receive(stage, sent)


def train_sparse(store, steps):
    """Run steps on gradients that depend on the step alone; return the commits."""
    commits = []
    for _ in range(steps):
        weights = streamed(store)
        send_dense(store, dense_gradients(store.program, store.step), weights)
        commits.append(store.commit())
    return commits


def contents(store):
    """All saved arrays of a store, by weight and role."""
    store.flush()
    return {
        (name, role): store.read(name, role, 0, math.prod(stored.shape)).copy()
        for name in store.program.weights
        for role, stored in store.roles(name).items()
    }


def assert_same_contents(one, other):
    """Compare two results of `contents` bit by bit."""
    assert one.keys() == other.keys()
    for tensor, array in one.items():
        theirs = other[tensor]
        assert array.dtype == theirs.dtype, tensor
        assert array.shape == theirs.shape, tensor
        assert array.tobytes() == theirs.tobytes(), tensor


class MaskedLoop:
    """The reference: masked dense weights, gradients and moments, in float64."""

    def __init__(self, store, method, optimizer):
        self.optimizer, self.method = OPTIMIZERS[optimizer], method
        specs = store.program.weights
        self.weights = {n: store.master(n).double().numpy().reshape(-1) for n in specs}
        self.trained = [name for name, spec in specs.items() if spec.trainable]
        self.masks = {name: np.ones(specs[name].elements, bool) for name in self.trained}
        for name in SPARSE:
            self.masks[name] = store.mask(name).mask()
        self.updates = {n: np.zeros(specs[n].elements, int) for n in self.trained}
        self.moments = {
            name: {role: np.zeros(specs[name].elements) for role in self.moment_names}
            for name in self.trained
        }
        self.step = 0

    @property
    def moment_names(self):
        """Names of the optimizer's moments."""
        return [role.name for role in self.optimizer.roles if role.group == 1]

    def train(self, gradients):
        """Make one step; return the norm of the gradients of entries that exist."""
        self.step += 1
        total = {}
        for stage in sorted(gradients, reverse=True):
            for name, gradient in gradients[stage].items():
                # The store adds the gradients of a weight that is used twice in float32.
                before = total.get(name, np.float32(0))
                total[name] = before + gradient.reshape(-1)
        total = {name: gradient.astype(np.float64) for name, gradient in total.items()}
        kept = {name: np.where(self.masks[name], g, 0) for name, g in total.items()}
        norm = math.sqrt(sum(float((g * g).sum()) for g in kept.values()))
        scale = min(1.0, CLIP / (norm + 1e-6))
        changes = self._changes(total)
        if not (changes and self.rule == "rigl"):
            for name in self.trained:
                self._update(name, kept[name] * scale)
        for name, (dropped, grown) in changes.items():
            self._change(name, dropped, grown)
        return norm

    @property
    def rule(self):
        """The method at this step: `densify` follows another one until its step."""
        return self.method.removeprefix("densify ") if self.step < 9 else self.method

    def _update(self, name, gradient):
        mask, rate, weight = self.masks[name], CONSTANT.peak, self.weights[name]
        self.updates[name] += mask
        n, moments, kind = np.maximum(self.updates[name], 1), self.moments[name], self.optimizer
        if isinstance(kind, AdamW):
            mean, square = moments["exp_avg"], moments["exp_avg_sq"]
            mean = kind.beta1 * mean + (1 - kind.beta1) * gradient
            square = kind.beta2 * square + (1 - kind.beta2) * gradient**2
            root = np.sqrt(square / (1 - kind.beta2**n)) + kind.epsilon
            weight = weight * (1 - rate * DECAY) - rate * mean / (1 - kind.beta1**n) / root
            moments = {"exp_avg": mean, "exp_avg_sq": square}
        elif isinstance(kind, Lion):
            mean = moments["exp_avg"]
            direction = np.sign(kind.beta1 * mean + (1 - kind.beta1) * gradient)
            weight = weight * (1 - rate * DECAY) - rate * direction
            moments = {"exp_avg": kind.beta2 * mean + (1 - kind.beta2) * gradient}
        else:
            direction = gradient = gradient + DECAY * weight
            if kind.momentum:
                direction = kind.momentum * moments["momentum"] + gradient
                moments = {"momentum": direction}
                if kind.nesterov:
                    direction = gradient + kind.momentum * direction
            weight = weight - rate * direction
        self.weights[name] = np.where(mask, weight, 0)
        self.moments[name] = {role: np.where(mask, m, 0) for role, m in moments.items()}

    def _changes(self, gradients):
        """Positions to drop and to grow, by weight."""
        found = {}
        for name in SPARSE:
            kept, absent = np.flatnonzero(self.masks[name]), np.flatnonzero(~self.masks[name])
            drop, grow = self._counts(name, kept.size, absent.size)
            if drop or grow:
                drop_key, grow_key = self._key(name, "drop"), self._key(name, "grow")
                magnitudes = self.weights[name][kept]
                dropped = first_of("smallest", drop_key, drop, kept, magnitudes)
                if self.rule == "rigl":
                    by_gradient = gradients[name][absent]
                    grown = first_of("largest", grow_key, grow, absent, by_gradient)
                else:
                    grown = first_of("random", grow_key, grow, absent)
                found[name] = dropped, grown
        return found

    def _counts(self, name, kept, absent):
        step, rule = self.step, self.rule
        if rule.startswith("densify"):
            return (0, absent) if step == 9 else (0, 0)
        if rule == "gmp" and step in (4, 7, 10, 13, 14):
            share = 1 - (1 - (step - 4) / 10) ** 3
            sparsity = 0.1 + (1 - DENSITY[name] - 0.1) * share
            return kept - math.floor(elements_of(name) * (1 - sparsity) + 0.5), 0
        if rule in ("set", "rigl") and step in (3, 7, 11, 15):
            fraction = 0.3 * 0.5 * (1 + math.cos(math.pi * step / 18))
            return (min(int(fraction * kept), absent),) * 2
        return 0, 0

    def _key(self, name, purpose):
        text = f"{SEED}/{name}/{self.step}/{purpose}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def _change(self, name, dropped, grown):
        self.masks[name][dropped] = False
        self.masks[name][grown] = True
        for array in (self.weights[name], self.updates[name], *self.moments[name].values()):
            array[dropped] = 0
            array[grown] = 0


def dense_moment(store, name, role):
    """A moment of the store as a dense float64 array, and how far one step of its code goes.

    8-bit codes are decoded from the format's description: sign, exponent, mantissa of 3 bits, and a
    scale for up to 256 entries, begun anew in every 4096 elements.
    """
    state, mask = store.state(name), store.mask(name)
    spec = store.program.weights[name]
    positions = np.arange(spec.elements) if mask is None else mask.positions()
    codes = state[role].numpy().reshape(-1)
    value, step = codes.astype(np.float64), np.zeros(codes.size)
    if f"{role}_scale" in state:
        top = 255 if role == "exp_avg_sq" else 127
        scales = state[f"{role}_scale"].numpy().astype(np.float64)
        sizes = np.bincount(positions // 4096, minlength=-(-spec.elements // 4096))
        groups = [min(256, n - i) for n in sizes for i in range(0, int(n), 256)]
        assert len(groups) == scales.size, (name, role)
        scale = np.repeat(scales, groups)
        magnitude = (codes & top).astype(np.int64)
        value = (1 + (magnitude & 7) / 8) * 2.0 ** ((magnitude >> 3) - (top >> 3)) * scale
        value = np.where(magnitude == 0, 0.0, np.where(codes & (255 - top), -value, value))
        step = np.maximum(np.abs(value) / 8, scale * 2.0 ** -(top >> 3) * 1.125) * 1.001
    dense, steps = np.zeros(spec.elements), np.zeros(spec.elements)
    dense[positions], steps[positions] = value, step
    return dense, steps
