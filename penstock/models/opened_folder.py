"""A Hugging Face folder as it was opened: its files are read once, whoever builds its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.models.folder import CONFIG, read_model_config, refuse_unreadable
from penstock.models.pretrained import Pretrained
from penstock.models.stored_buffers import with_stored_buffers
from penstock.models.weight_files import WeightFiles
from penstock.models.weight_origins import Origin

if TYPE_CHECKING:
    from penstock.models.origin import WeightSource
    from penstock.models.tensor_names import TensorNames


@dataclass(frozen=True)
class OpenedFolder:
    """Configuration, and where the weights are.

    Attributes:
        folder: with `config.json` and the tokenizer.
        fields: the content of `config.json`.
        overrides: fields of the configuration to replace.
        ignore: patterns of tensors in the files that the model may leave unused.
        files: the weights; None for a run's copy of the small files.
    """

    folder: Path
    fields: Mapping[str, Any] = field(repr=False)
    overrides: Mapping[str, Any]
    ignore: tuple[str, ...] = ()
    files: WeightFiles | None = None

    @classmethod
    def with_weights(
        cls,
        folder: Path,
        overrides: Mapping[str, Any],
        ignore: Sequence[str],
        weights: Path,
    ) -> OpenedFolder:
        """Open a folder with the weights in `weights`; errors are those of `ModelSource.from_hf`.

        Whether `transformers` knows the configuration is not asked, unless there are no weights.
        """
        refuse_unreadable(folder)
        fields = read_model_config(folder)
        try:
            files = WeightFiles(weights)
        except PenstockError:
            from penstock.models.huggingface_config import refuse_unknown_type

            refuse_unknown_type(fields, str(folder / CONFIG))  # the first thing to be told
            raise
        return cls(folder, fields, overrides, tuple(ignore), files)

    @classmethod
    def without_weights(cls, kept: Path, overrides: Mapping[str, Any]) -> OpenedFolder:
        """Open a run's copy of the small files of a folder."""
        return cls(kept, read_model_config(kept), overrides)

    def tensors(self) -> list[tuple[str, str, tuple[int, ...], bool]]:
        """Return name, type, shape, and whether it is packed, of every tensor of the files."""
        stored = {} if self.files is None else self.files.tensors
        return [
            (name, one.extent.dtype, one.extent.shape, one.packed is not None)
            for name, one in sorted(stored.items())
        ]

    def origin(
        self, constructor: WeightSource, names: TensorNames, origins: Mapping[str, Origin]
    ) -> WeightSource:
        """Return the model of a constructor with the values that are in the files.

        Args:
            constructor: the model of the configuration.
            names: its tensors by name, for their shapes and types.
            origins: of the weights in `files`.
        """
        if self.files is None:
            return with_stored_buffers(constructor, names, self.folder)
        return Pretrained(constructor, names, self.files, origins)

    def recorded(self) -> RecordedFolder:
        """Record the model; errors are those of `ModelSource.from_hf`."""
        from penstock.models import huggingface_config as library
        from penstock.models.huggingface_weight_names import match

        library.refuse_unknown_type(self.fields, str(self.folder / CONFIG))
        count = None if self.files is None else len(self.files.tensors)
        config = library.make_config(self.fields, self.overrides, tensors=count)
        task = library.find_task(config)
        made, origins = library.recorded(config, task), dict[str, Origin]()
        if self.files is not None:
            origins = match(
                self.files.tensors,
                made.module,
                made.aliases,
                folder=self.files.folder,
                ignore=self.ignore,
            )
        return RecordedFolder(config, task, self.origin(made, made.names, origins))


@dataclass(frozen=True)
class RecordedFolder:
    """Configuration, task, and modules with the values of the files."""

    config: Any
    task: str
    origin: WeightSource

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about the folder for the start of a run."""
        return self.origin.notes if isinstance(self.origin, Pretrained) else ()
