"""How activations lie on the mesh: tokens over one axis, features over the other.

A layout divides the cores into `feature_rows` that divide the features and `token_columns` that
divide the tokens. Long sequences of narrow layers want few feature rows, since each of them takes
part in every partial sum; short sequences of wide layers want many, since a vector operation on few
tokens costs its set-up and little else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.errors import ConfigError
from penstock.wafer.parameters import Mesh

Axis = Literal["columns", "rows"]


@dataclass(frozen=True)
class ActivationLayout:
    """A division of tokens and features over a mesh.

    Attributes:
        mesh: the cores.
        tokens_over: the axis of the mesh along which tokens are divided. Features are divided along
            the other one, along which partial sums travel.
        column_groups: parts into which the tokens' axis is cut; each holds all tokens and a part of
            the features.
        row_groups: parts into which the features' axis is cut; each holds all features and a part
            of the tokens. At most one of the two is above 1.

    Raises:
        ConfigError: both groups above 1, or more groups than cores along the axis.
    """

    mesh: Mesh
    tokens_over: Axis = "columns"
    column_groups: int = 1
    row_groups: int = 1

    def __post_init__(self) -> None:
        if min(self.column_groups, self.row_groups) != 1:
            raise ConfigError(
                "layout: expected column_groups or row_groups to be 1, got "
                f"{self.column_groups} and {self.row_groups}"
            )
        for name, groups, length in (
            ("column_groups", self.column_groups, self.axis_columns),
            ("row_groups", self.row_groups, self.axis_rows),
        ):
            if groups > length:
                raise ConfigError(
                    f"layout: expected {name} from 1 to {length}, the cores along that axis of "
                    f"{self.mesh}, got {groups}"
                )

    @property
    def axis_rows(self) -> int:
        """Cores along the features' axis."""
        return self.mesh.rows if self.tokens_over == "columns" else self.mesh.columns

    @property
    def axis_columns(self) -> int:
        """Cores along the tokens' axis."""
        return self.mesh.columns if self.tokens_over == "columns" else self.mesh.rows

    @property
    def feature_rows(self) -> int:
        """Parts into which features are divided."""
        return self.axis_rows // self.row_groups * self.column_groups

    @property
    def token_columns(self) -> int:
        """Parts into which tokens are divided."""
        return self.axis_columns // self.column_groups * self.row_groups

    @property
    def chain_rows(self) -> int:
        """Cores through which a partial sum travels in one column."""
        return self.axis_rows // self.row_groups

    def tokens(self, tokens: int) -> int:
        """Return the tokens of the fullest core."""
        return -(-tokens // self.token_columns)

    def features(self, features: int) -> int:
        """Return the features of the fullest core."""
        return -(-features // self.feature_rows)

    def __str__(self) -> str:
        groups = max(self.column_groups, self.row_groups)
        if groups == 1:
            features_over = "rows" if self.tokens_over == "columns" else "columns"
            return (
                f"tokens over {self.token_columns} {self.tokens_over}, features over "
                f"{self.feature_rows} {features_over}"
            )
        return (
            f"tokens over {self.token_columns}, features over {self.feature_rows} parts, {groups} "
            "groups"
        )


def candidate_layouts(mesh: Mesh) -> Iterator[ActivationLayout]:
    """Yield layouts of a mesh, plain ones first: groups are powers of two and three times those."""
    axes: tuple[Axis, ...] = ("columns", "rows")
    for axis in axes:
        yield ActivationLayout(mesh, axis)
    sizes = sorted(base << shift for base in (2, 3) for shift in range(12))
    for axis in axes:
        plain = ActivationLayout(mesh, axis)
        for groups in sizes:
            if groups <= plain.axis_columns:
                yield ActivationLayout(mesh, axis, column_groups=groups)
            if groups <= plain.axis_rows:
                yield ActivationLayout(mesh, axis, row_groups=groups)
