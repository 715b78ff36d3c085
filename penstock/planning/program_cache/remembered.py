"""Models on disk: what a process that starts again needs of a model that `transformers` builds.

Recording such a model imports the library, which takes seconds. A model that is fully described by
its configuration is remembered by its summary and by the recipe of its weights. An entry is found
by a digest of this package's code, the versions of the libraries and the configuration. It has the
digests of all files of `transformers` that were imported, and descriptions of the model's classes.

The model of a Hugging Face folder is remembered in two entries. One is that of its configuration,
which a resumed run needs. The other one has, for a list of tensors (names, types, shapes), the
tensor of each weight. No entry has values of the folder. A model of which the library computes a
weight from several tensors has only the first entry.

Entries are written by a process whose first use of `transformers` was to record the model, and read
only while a process has not imported it: nothing of it can be replaced until then. A process in
which functions of PyTorch were replaced neither writes nor reads entries. A model that is recorded
after it was recalled must equal its summary.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.compiler.serialization import MalformedError, NotSerializableError, fields
from penstock.config import HuggingFaceConfigModel, ModelSpec, PresetModel
from penstock.garbage_collection import collection_disabled
from penstock.models import (
    ModelKey,
    ModelSource,
    ModelSummary,
    OpenedFolder,
    Pretrained,
    is_causal_with_new_values,
    kept_of,
    read_origins,
    recalled_model,
    written_origins,
)
from penstock.planning.program_cache.compile_messages import noticing
from penstock.planning.program_cache.digests import digest_of
from penstock.planning.program_cache.entries import read_entry, remove_entry, write_entry
from penstock.planning.program_cache.modules import (
    UndescribedError,
    describe_classes,
    has_same_class,
    refuse_changed_torch,
)
from penstock.planning.program_cache.versions import code_digest, file_digest

if TYPE_CHECKING:
    from penstock.models import Origin, WeightRecipe

_LIBRARY = "transformers"
_UNREADABLE = (
    *(MalformedError, OSError),
    *(ValueError, KeyError, TypeError, AttributeError, RuntimeError),  # as of `ModelSummary.read`
)


def remembered_model(spec: ModelSpec, record: Callable[[], ModelSource]) -> ModelSource:
    """Return the model of a configuration: recalled, if an earlier process has recorded it.

    **Arguments:** `record` records the model; its errors are those of this function.
    """
    digest = _digest_of(spec) if is_unchanged() else None
    if digest is None:
        return record()
    return _recall(digest, record) or _recorded(digest, record)


def remembered_folder(opened: OpenedFolder) -> ModelSource:
    """Return the model of a folder: recalled, if an earlier process has recorded the model of an
    equal configuration with tensors of the same names, types and shapes.

    The values are those of the opened files, whichever folder was recorded.
    """

    def record() -> ModelSource:
        return ModelSource.from_opened_folder(opened)

    if not is_unchanged():
        return record()
    digest = digest_of(code_digest(), repr(opened.fields), repr(opened.overrides))
    tensors = digest_of(digest, repr(opened.tensors()), repr(opened.ignore))
    origins = {} if opened.files is None else _read_origins(tensors)
    found = None if origins is None else _recall(digest, record)
    if found is not None and origins is not None:
        origin = opened.origin(found.origin, found.structure.names, origins)
        return found.in_folder(opened, origin)
    source = _recorded(digest, record)
    if source.key is not None and opened.files is not None:
        _write_origins(tensors, source)
    return source


def is_unchanged() -> bool:
    """Whether no code of the libraries can have been replaced in this process."""
    if _LIBRARY in sys.modules:
        return False
    try:
        refuse_changed_torch()
    except UndescribedError:
        return False
    return True


def is_as_remembered(source: ModelSource) -> bool:
    """Whether the code of a model's classes is that of its key; True if the model is not recorded
    here."""
    assert source.key is not None
    if not source.structure.is_recorded:
        return True
    try:
        refuse_changed_torch()
        return describe_classes(source.module) == source.key.classes
    except UndescribedError:
        return False


def _digest_of(spec: ModelSpec) -> str | None:
    """Return the digest of a model that its configuration describes; None of another model."""
    if isinstance(spec, PresetModel):
        return digest_of(code_digest(), repr((spec.preset, spec.overrides)))
    if not isinstance(spec, HuggingFaceConfigModel):
        return None
    if isinstance(spec.hf_config, str):  # a file, which may change
        return None
    return digest_of(code_digest(), repr(spec.hf_config))


def _recorded(digest: str, record: Callable[[], ModelSource]) -> ModelSource:
    """Record a model, and remember it unless something is said meanwhile."""
    with noticing() as noticed:
        source = record()
    if noticed.anything:
        return source
    with collection_disabled():
        return _remember(digest, source)


def _recall(digest: str, record: Callable[[], ModelSource]) -> ModelSource | None:
    content = read_entry(digest, "models")
    if content is None:
        return None
    try:
        have, written = fields.unframed(content)
        classes: dict[str, str] = have["classes"]
        summary = ModelSummary.read(have["model"])
        is_same = _are_unchanged(have["files"])
        is_same = is_same and all(has_same_class(*pair) for pair in classes.items())
    except _UNREADABLE:
        is_same = False
    if not is_same:
        remove_entry(digest, "models")
        return None

    def recipe() -> WeightRecipe | None:
        from penstock.models import read_recipe  # which imports kernels

        try:
            with collection_disabled():
                return read_recipe(written)
        except MalformedError:
            remove_entry(digest, "models")
            return None

    return recalled_model(summary, recipe, record, ModelKey(digest, classes))


def _remember(digest: str, source: ModelSource) -> ModelSource:
    """Write the entry of a model; return the model, with its key if there is an entry."""
    from penstock.models import write_recipe

    kept = kept_of(source)
    if kept is None or not is_causal_with_new_values(source):
        return source
    summary, recipe = kept
    try:
        written = write_recipe(recipe)
        classes = describe_classes(source.module)
        refuse_changed_torch()
    except (NotSerializableError, UndescribedError):
        return source
    have = {"files": _digests(_imported()), "classes": classes, "model": summary.written()}
    write_entry(digest, fields.framed(have, written), "models")
    return replace(source, key=ModelKey(digest, classes))


def _read_origins(key: str) -> dict[str, Origin] | None:
    """Return the tensor of each weight, of a folder with these tensors; None if unknown."""
    content = read_entry(key, "models")
    if content is None:
        return None
    try:
        have, _ = fields.unframed(content)
        if _are_unchanged(have["files"]):
            return read_origins(have["origins"])
    except _UNREADABLE:
        pass
    remove_entry(key, "models")
    return None


def _write_origins(key: str, source: ModelSource) -> None:
    """Write the tensor of each weight, unless the code of the library computes a weight, or the
    folder has a notice."""
    assert isinstance(source.origin, Pretrained)
    written = None if source.notes else written_origins(source.origin.origins)
    if written is not None:
        have = {"files": _digests(_imported()), "origins": written}
        write_entry(key, fields.framed(have), "models")


def _are_unchanged(digests: dict[str, str]) -> bool:
    """Whether files of the library have these digests."""
    return digests == _digests(digests)


def _imported() -> list[str]:
    """Return the files of the library that this process has imported, by their place in it."""
    root, found = _library_folder(), set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and name.split(".")[0] == _LIBRARY:
            found.add(os.path.relpath(file, root))
    return sorted(found)


def _digests(names: Iterable[str]) -> dict[str, str]:
    """Return the digests of files of the library."""
    root = _library_folder()
    return {name: file_digest(str(root / name)) for name in names}


def _library_folder() -> Path:
    spec = find_spec(_LIBRARY)  # does not import it
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
