"""What the programs of streamed products share: where features and tokens are, and the words that
enter at the edge."""

from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import ConfigError
from penstock.wafer.closed_form import MaskCounts, StreamedProduct, StreamingOptions, assign_rows
from penstock.wafer.language import Code, Colour, MeshProgram
from penstock.wafer.mesh import MeshReport, TraceOptions
from penstock.wafer.parameters import CoreParameters, Mesh


@dataclass(frozen=True, eq=False)
class SimulatedProduct:
    """A product that the simulator computed.

    Attributes:
        numbers: of the result, float32.
        report: cycles, states of cores, words of links.
    """

    numbers: np.ndarray
    report: MeshReport

    @property
    def cycles(self) -> float:
        """Simulated cycles."""
        return self.report.cycles


@dataclass(frozen=True)
class Run:
    """On what a product is simulated, and how.

    Attributes:
        element_bytes: of activations and values, 2 or 4.
        rounds: whether 16-bit numbers are rounded; by default where element_bytes is 2. Without,
            cycles and memory are those of 16 bits, and numbers have 32.
        trace: a record of the run's beginning.
    """

    mesh: Mesh
    core: CoreParameters
    options: StreamingOptions
    element_bytes: int = 2
    rounds: bool | None = None
    trace: TraceOptions | None = None

    def program(self) -> MeshProgram:
        """Return an empty program."""
        return MeshProgram(
            self.mesh, self.core, element_bytes=self.element_bytes, rounds=self.rounds
        )


class Spread:
    """Features over the rows of a mesh, tokens over its columns, for the entries of a mask.

    Attributes:
        mask: booleans [outputs, inputs].
        rows: row of cores of each input feature.
        places: place of each input feature among those of its row.
    """

    def __init__(self, mask: np.ndarray, tokens: int, run: Run) -> None:
        if mask.ndim != 2 or not mask.size or mask.dtype != np.bool_:
            raise ConfigError(
                "mask: expected booleans with the shape [outputs, inputs], got an array of "
                f"{mask.dtype} with shape {list(mask.shape)}"
            )
        if tokens < 1:
            raise ConfigError(f"tokens: expected a number from 1 up, got {tokens}")
        self.mask = mask
        self.outputs, self.inputs = mask.shape
        self.all_tokens = tokens
        self.mesh = run.mesh
        self.tokens = -(-tokens // run.mesh.columns)
        pack = 2 if run.element_bytes == 2 else 1
        self.width = -(-self.tokens // pack) * pack  # cells of a row of tokens
        self.words = self.width // pack
        self.rows = assign_rows(mask.sum(axis=0), run.mesh.rows, is_sorted=run.options.is_sorted)
        order = np.argsort(self.rows, kind="stable")
        counts = np.bincount(self.rows, minlength=run.mesh.rows)
        starts = np.cumsum(counts) - counts
        self.places = np.empty(self.inputs, np.int64)
        self.places[order] = np.arange(self.inputs) - np.repeat(starts, counts)
        self.most_features = int(counts.max())

    def check(self, name: str, values: np.ndarray, features: int) -> None:
        """Refuse activations or gradients of another shape.

        Raises:
            ConfigError: naming both shapes.
        """
        if values.shape != (self.all_tokens, features):
            raise ConfigError(
                f"{name}: expected the shape {[self.all_tokens, features]}, got "
                f"{list(values.shape)}"
            )

    def columns(self, values: np.ndarray) -> np.ndarray:
        """Return rows of tokens [tokens, n] as what each column has of them [columns, n, width]."""
        columns = self.mesh.columns
        full = np.zeros((columns * self.tokens, values.shape[1]), np.float32)
        full[: len(values)] = values
        found = np.zeros((columns, values.shape[1], self.width), np.float32)
        found[:, :, : self.tokens] = full.reshape(columns, self.tokens, -1).transpose(0, 2, 1)
        return found

    def tokens_of(self, columns: np.ndarray) -> np.ndarray:
        """Return what columns have [columns, n, width] as rows of tokens [tokens, n]."""
        cut = columns[:, :, : self.tokens].transpose(0, 2, 1)
        return cut.reshape(-1, columns.shape[1])[: self.all_tokens].copy()

    def features(self, values: np.ndarray) -> np.ndarray:
        """Return activations [tokens, inputs] as cores have them [cores, features, width]."""
        by_column = self.columns(values)
        found = np.zeros(
            (self.mesh.rows, self.mesh.columns, self.most_features, self.width), np.float32
        )
        found[self.rows, :, self.places] = by_column.transpose(1, 0, 2)
        return found.reshape(self.mesh.cores, self.most_features, self.width)

    def from_features(self, cores: np.ndarray) -> np.ndarray:
        """Return what cores have [cores, features, width] as activations [tokens, inputs]."""
        shape = (self.mesh.rows, self.mesh.columns, self.most_features, self.width)
        chosen = cores.reshape(shape)[self.rows, :, self.places]  # [inputs, columns, width]
        return self.tokens_of(chosen.transpose(1, 0, 2))

    def entries(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return output and input feature of each entry of a row of cores, in order of outputs and
        of places."""
        features = np.flatnonzero(self.rows == row)
        features = features[np.argsort(self.places[features], kind="stable")]
        outputs, places = np.nonzero(self.mask[:, features])
        return outputs, features[places]


def entry_words(
    spread: Spread, row: int, values: np.ndarray | None, words_each: int, last_control: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the words that enter a row of cores: entries, and a control word after each output
    feature. They are the values, the places of features, and which are control words.

    Entries without indices are the words of a dense weight, whose cores count the places.

    Args:
        values: of the weight [outputs, inputs]; None if the indices alone enter.
        words_each: 2 if an index and a value do not fit in one word.
        last_control: whether a control word follows the last output feature too.
    """
    outputs, features = spread.entries(row)
    # An entry comes after the entries before it and a control word of each output before its own.
    at = np.arange(len(outputs)) * words_each + outputs
    numbers = np.arange(spread.outputs)
    ends = np.searchsorted(outputs, numbers, side="right") * words_each + numbers
    total = len(outputs) * words_each + spread.outputs
    first, second = np.zeros(total, np.float32), np.zeros(total, np.float32)
    controls = np.zeros(total, bool)
    controls[ends] = True
    second[at] = spread.places[features]
    if values is not None:
        first[at + words_each - 1] = values[outputs, features]
    kept = total if last_control else total - 1
    return first[:kept], second[:kept], controls[:kept]


def entry_stream(
    program: MeshProgram,
    spread: Spread,
    weight: np.ndarray | None,
    *,
    last_control: bool = True,
    is_indexed: bool = True,
) -> Colour:
    """Route the entries of a weight, or of a mask alone, from the edge along the rows of cores that
    have their features; return their colour.

    Args:
        is_indexed: whether 32-bit values are preceded by a word with their index; a 16-bit value
            shares its word with the index.
    """
    entries = program.colour("entries")
    program.route(entries, program.cores(None, slice(0, -1)), "west", ("east", "ramp"))
    program.route(entries, program.cores(None, -1), "west", "ramp")
    values = None if weight is None else program.rounded(weight)
    words_each = 2 if is_indexed and program.pack == 1 and weight is not None else 1
    for row in range(program.mesh.rows):
        words = entry_words(spread, row, values, words_each, last_control)
        program.feed(entries, int(program.cores(row, 0)[0]), "west", *words)
    return entries


class EntryPlaces:
    """Where a core finds the place of an arriving entry's feature: in the entry's index, or, for a
    dense weight of 32-bit values, by counting the entries since the last control word.

    Attributes:
        place: the register with the place.
    """

    def __init__(self, program: MeshProgram, entries: Colour, data: Code, is_indexed: bool) -> None:
        self.is_counted = not is_indexed and program.pack == 1
        self.place = program.register("place") if self.is_counted else data.index
        if program.pack == 1 and not self.is_counted:
            data.take(entries)  # the value follows its index in a word of its own

    def next_entry(self, data: Code) -> None:
        """Go on to the next feature, after an entry."""
        if self.is_counted:
            data.advance(self.place)

    def next_output(self, end: Code) -> None:
        """Go back to the first feature, after a control word."""
        if self.is_counted:
            end.set(self.place, 0)


def gradient_stream(program: MeshProgram, spread: Spread, gradients: np.ndarray) -> Colour:
    """Broadcast rows of dY [tokens, outputs] down the columns of cores; return their colour."""
    colour = program.colour("gradients")
    program.route(colour, program.cores(slice(0, -1)), "north", ("south", "ramp"))
    program.route(colour, program.cores(-1), "north", "ramp")
    columns = program.rounded(spread.columns(gradients)).reshape(program.mesh.columns, -1)
    for column, cells in enumerate(columns):
        second = cells[1::2] if program.pack == 2 else None
        program.feed(colour, column, "north", cells[:: program.pack], second, from_host=False)
    return colour


def kept_entries(weight: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Return the mask of a weight: all entries if none is given.

    Raises:
        ConfigError: their shapes differ.
    """
    kept = np.ones(weight.shape, bool) if mask is None else mask
    if kept.shape != weight.shape:
        raise ConfigError(
            f"mask: expected the shape of the weight, {list(weight.shape)}, got {list(kept.shape)}"
        )
    return kept


def closed_form_of(
    spread: Spread, run: Run, *, is_indexed: bool = True
) -> tuple[StreamedProduct, MaskCounts, StreamingOptions]:
    """Return what the closed form is to be asked for the same product, mask and options.

    Args:
        is_indexed: whether values travel with their indices, as all but those of dense weights of
            32-bit values do.
    """
    counts = np.zeros((spread.outputs, run.mesh.rows), np.int64)
    outputs, inputs = np.nonzero(spread.mask)
    np.add.at(counts, (outputs, spread.rows[inputs]), 1)
    product = StreamedProduct(
        spread.outputs,
        spread.inputs,
        spread.all_tokens,
        max(float(spread.mask.mean()), 1e-12),
        is_indexed=is_indexed,
        element_bytes=run.element_bytes,
    )
    return product, MaskCounts(counts, spread.inputs), replace(run.options)
