"""Optimizers, their state, and parameter groups by name pattern.

An optimizer contains settings only. Its state is stored in the store's slabs and passed in as flat
arrays by role, with one fused pass per weight. Moments are float32, or 8 bits per element with one
scale per `GROUP` elements (`kernels/moments.py`); the scales are then a role of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NotRequired, Protocol, TypedDict, Unpack

import numpy as np
import xxhash

from penstock.errors import ConfigError, did_you_mean
from penstock.name_patterns import closest, matches
from penstock.store.roles import Role

if TYPE_CHECKING:
    from penstock.kernels.moments import Moment
    from penstock.kernels.packed_entries import PackedEntries

State = Mapping[str, np.ndarray]
"""Flat arrays by role."""

Moments = Literal["fp32", "8bit"]
"""The storage type of an optimizer's moments."""


class UpdateSettings(TypedDict):
    """The settings of one update.

    Attributes:
        step: the number of this weight's update, from 1.
        learning_rate, weight_decay: the values for this step and this weight's group.
        gradient_scale: the factor that is applied to the gradient first (the clip factor); 1 by
            default.
        key, position: seeds of the random rounding of 8-bit moments: a hash of the weight's name,
            and the offset of these elements in the weight, a multiple of `GROUP`; 0 by default.
        packed: the entries of a sparse weight, to which the elements belong.
        streamed: where the new streamed values of the weight are written, while weight and state
            stay as they are; float32 or uint16 `[n]`. Only if the optimizer `computes_streamed`.
    """

    step: int
    learning_rate: float
    weight_decay: float
    gradient_scale: NotRequired[float]
    key: NotRequired[int]
    position: NotRequired[int]
    packed: NotRequired["PackedEntries | None"]
    streamed: NotRequired[np.ndarray | None]


class Optimizer(Protocol):
    """The interface of an optimizer."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """The arrays that the optimizer keeps per weight, all zeros at the start."""
        ...

    @property
    def corrected_betas(self) -> tuple[float, ...]:
        """The decay rates whose bias depends on the number of an entry's updates."""
        ...

    @property
    def computes_streamed(self) -> bool:
        """Whether it computes new streamed values without an update, in less time than that."""
        ...

    def update(
        self,
        weight: tuple[np.ndarray, ...],
        gradient: np.ndarray,
        state: State,
        **settings: Unpack[UpdateSettings],
    ) -> None:
        """Update one weight, or a part of it, and its state in place.

        Args:
            weight: `(float32 [n],)`, or `(high, low)` uint16 `[n]` of a split master.
            gradient: float32 `[n]` or bfloat16 patterns (uint16 `[n]`).
            state: an array for each of `roles`.
            settings: of this update.
        """
        ...


def rounding_key(name: str) -> int:
    """Return the number of a weight that seeds the random rounding of its 8-bit moments."""
    return xxhash.xxh3_64_intdigest(name.encode())


def _moment_roles(names: Sequence[str], moments: Moments) -> tuple[Role, ...]:
    if moments == "fp32":
        return tuple(Role(name) for name in names)
    from penstock.kernels.moments import GROUP

    coded = [(Role(name, "uint8"), Role(scale_of(name), "float32", GROUP)) for name in names]
    return tuple(role for pair in coded for role in pair)


def is_signed(moment: str) -> bool:
    """Return whether a moment is a mean of gradients; a mean of their squares has no sign."""
    return moment != "exp_avg_sq"


def scale_of(moment: str) -> str:
    """Return the role of the scales of an 8-bit moment."""
    return f"{moment}_scale"


def _moment(state: State, name: str) -> "Moment":
    scale = state.get(scale_of(name))
    return state[name] if scale is None else (state[name], scale)


def _require(optimizer: str, name: str, value: float, low: float, high: float) -> None:
    if not low <= value < high:
        raise ConfigError(
            f"{optimizer}: {name} must be at least {low:g} and below {high:g}, got {value!r}"
        )


@dataclass(frozen=True)
class AdamW:
    """`torch.optim.AdamW`: decoupled weight decay, bias-corrected moments."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    moments: Moments = "fp32"

    def __post_init__(self) -> None:
        _require("adamw", "beta1", self.beta1, 0.0, 1.0)
        _require("adamw", "beta2", self.beta2, 0.0, 1.0)
        _require("adamw", "epsilon", self.epsilon, 0.0, float("inf"))

    @property
    def roles(self) -> tuple[Role, ...]:
        return _moment_roles(("exp_avg", "exp_avg_sq"), self.moments)

    @property
    def corrected_betas(self) -> tuple[float, ...]:
        return self.beta1, self.beta2

    @property
    def computes_streamed(self) -> bool:
        return self.moments == "fp32"

    def update(
        self,
        weight: tuple[np.ndarray, ...],
        gradient: np.ndarray,
        state: State,
        **settings: Unpack[UpdateSettings],
    ) -> None:
        from penstock.kernels.adamw import adamw

        adamw(
            weight,
            gradient,
            _moment(state, "exp_avg"),
            _moment(state, "exp_avg_sq"),
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            **settings,
        )


@dataclass(frozen=True)
class SGD:
    """`torch.optim.SGD` with dampening 0: weight decay is added to the gradient, not decoupled."""

    momentum: float = 0.0
    nesterov: bool = False
    moments: Moments = "fp32"

    def __post_init__(self) -> None:
        _require("sgd", "momentum", self.momentum, 0.0, 1.0)
        if self.nesterov and self.momentum == 0:
            raise ConfigError("sgd: nesterov needs a momentum above 0; set momentum or drop it")

    @property
    def roles(self) -> tuple[Role, ...]:
        return _moment_roles(("momentum",) if self.momentum else (), self.moments)

    @property
    def corrected_betas(self) -> tuple[float, ...]:
        return ()

    @property
    def computes_streamed(self) -> bool:
        return self.momentum > 0 and self.moments == "fp32"

    def update(
        self,
        weight: tuple[np.ndarray, ...],
        gradient: np.ndarray,
        state: State,
        **settings: Unpack[UpdateSettings],
    ) -> None:
        from penstock.kernels.sgd import sgd, sgd_momentum

        if not self.momentum:
            sgd(
                weight,
                gradient,
                learning_rate=settings["learning_rate"],
                weight_decay=settings["weight_decay"],
                gradient_scale=settings.get("gradient_scale", 1.0),
            )
            return
        sgd_momentum(
            weight,
            gradient,
            _moment(state, "momentum"),
            momentum=self.momentum,
            nesterov=self.nesterov,
            **settings,
        )


@dataclass(frozen=True)
class Lion:
    """Lion (Chen et al. 2023): the sign of a blend of gradient and mean; decoupled decay."""

    beta1: float = 0.9
    beta2: float = 0.99
    moments: Moments = "fp32"

    def __post_init__(self) -> None:
        _require("lion", "beta1", self.beta1, 0.0, 1.0)
        _require("lion", "beta2", self.beta2, 0.0, 1.0)

    @property
    def roles(self) -> tuple[Role, ...]:
        return _moment_roles(("exp_avg",), self.moments)

    @property
    def corrected_betas(self) -> tuple[float, ...]:
        return ()

    @property
    def computes_streamed(self) -> bool:
        return self.moments == "fp32"

    def update(
        self,
        weight: tuple[np.ndarray, ...],
        gradient: np.ndarray,
        state: State,
        **settings: Unpack[UpdateSettings],
    ) -> None:
        from penstock.kernels.lion import lion

        lion(
            weight,
            gradient,
            _moment(state, "exp_avg"),
            beta1=self.beta1,
            beta2=self.beta2,
            **settings,
        )


_OPTIMIZERS: dict[str, type[AdamW] | type[SGD] | type[Lion]] = {
    "adamw": AdamW,
    "sgd": SGD,
    "lion": Lion,
}


def make_optimizer(name: str, **hyper: Any) -> Optimizer:
    """Return the optimizer called `name` with these settings.

    Args:
        name: `adamw`, `sgd` or `lion`.
        hyper: `adamw`: beta1, beta2, epsilon; `sgd`: momentum, nesterov; `lion`: beta1, beta2; all:
            moments, `fp32` or `8bit`.

    Raises:
        ConfigError: an unknown name or setting, or a value out of its range.
    """
    if name not in _OPTIMIZERS:
        raise ConfigError(
            f"optimizer {name!r} is not known{did_you_mean(name, _OPTIMIZERS)}; "
            f"choose one of {', '.join(_OPTIMIZERS)}"
        )
    kind = _OPTIMIZERS[name]
    known = [field.name for field in fields(kind)]
    for setting in hyper:
        if setting not in known:
            raise ConfigError(
                f"{name} has no setting {setting!r}{did_you_mean(setting, known)}; "
                f"it has {', '.join(known)}"
            )
    return kind(**hyper)


@dataclass(frozen=True)
class Group:
    """Settings for the weights whose names match one of `match`.

    A pattern is a shell pattern over the whole name: `*.bias`, `transformer.h.[0-9].*`. A weight
    decay of None means the run's default.
    """

    match: Sequence[str]
    learning_rate_scale: float = 1.0
    """Factor on the schedule's learning rate."""
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        name = f"optimizer group {self.match!r}"
        if isinstance(self.match, str) or not self.match:
            raise ConfigError(f"{name}: expected a list of one or more name patterns")
        for what in ("learning_rate_scale", "weight_decay"):
            value = getattr(self, what)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"{name}: {what} must be 0 or more, got {value!r}")


@dataclass(frozen=True)
class GroupSettings:
    """The training settings of one weight."""

    learning_rate_scale: float
    """Times the schedule's learning rate."""
    weight_decay: float
    group: int | None
    """Index of the group that matched; None for the default."""


def assign_groups(
    weights: Mapping[str, tuple[int, ...]],
    groups: Sequence[Group],
    *,
    weight_decay: float,
    decay_1d: bool,
    aliases: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> dict[str, GroupSettings]:
    """Give each weight the settings of the first group that matches one of its names.

    Args:
        weights: shape of every trainable weight by name.
        groups: in order of precedence.
        weight_decay: for weights whose group sets none.
        decay_1d: whether that default also holds for weights of fewer than two dimensions (biases,
            norms). A weight decay set by a group applies to every shape.
        aliases: further names of tied weights.

    Returns:
        Settings by weight name, in the order of `weights`.

    Raises:
        ConfigError: a group matches no weight, or only weights that earlier groups matched; or two
            names of a tied weight match different groups, and no group matches both.
    """
    settings = {}
    used = [False] * len(groups)
    matched: list[list[int]] = []
    for name, shape in weights.items():
        hits = _groups_of((name, *aliases.get(name, ())), groups)
        matched.append(hits)
        chosen = hits[0] if hits else None
        decay = weight_decay if decay_1d or len(shape) >= 2 else 0.0
        scale = 1.0
        if chosen is not None:
            used[chosen] = True
            group = groups[chosen]
            scale = group.learning_rate_scale
            decay = decay if group.weight_decay is None else group.weight_decay
        settings[name] = GroupSettings(scale, decay, chosen)
    for index, group in enumerate(groups):
        if used[index]:
            continue
        patterns = ", ".join(repr(pattern) for pattern in group.match)
        if any(index in hits for hits in matched):
            raise ConfigError(
                f"optimizer group {index + 1} ({patterns}) gets no weight: earlier groups match "
                "all of its weights; move it up"
            )
        names = [one for name in weights for one in (name, *aliases.get(name, ()))]
        hint = next(filter(None, (closest(p, names) for p in group.match)), "")
        raise ConfigError(
            f"optimizer group {index + 1} ({patterns}) matches none of the {len(weights)} "
            f"trainable weights{hint}; correct the pattern or remove the group"
        )
    return settings


def _groups_of(names: Sequence[str], groups: Sequence[Group]) -> list[int]:
    """Return the indices of the groups that match one of a weight's names."""
    found: dict[str, list[int]] = {}
    for name in names:
        hits = [i for i, group in enumerate(groups) if matches(name, group.match)]
        for other, others in found.items():
            if hits and not set(hits) & set(others):
                raise ConfigError(
                    f"{other} and {name} are one weight, but optimizer group {others[0] + 1} "
                    f"matches the one name and group {hits[0] + 1} the other; let one group match "
                    "both names, or remove one of the names"
                )
        if hits:
            found[name] = hits
    return sorted({i for hits in found.values() for i in hits})
