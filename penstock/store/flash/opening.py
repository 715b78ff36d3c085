"""The files of a flash store, opened for training: an existing store, or a new one."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import BudgetError
from penstock.io import durable, failpoints
from penstock.store import files
from penstock.store.flash.description import EXTENTS, JOURNAL, require_same
from penstock.store.flash.division import Division
from penstock.store.flash.journal import Journal, Record
from penstock.store.flash.layout import FlashLayout
from penstock.store.flash.medium import ExtentFile
from penstock.store.flash.version import Version
from penstock.store.holding import Holding
from penstock.store.mask_rule import MaskRule


@dataclass(frozen=True)
class OpenFiles:
    """The journal, the extents, and the version of the last durable step; `last` is its record."""

    journal: Journal
    file: ExtentFile
    version: Version
    last: Record | None = None


def open_files(
    folder: Path, layout: FlashLayout, described: Mapping[str, Any], opened: ExitStack
) -> OpenFiles:
    """Open or create the files in `folder`; `opened` closes them.

    **Arguments:** `described` is the first record of the store's journal (`describe`).

    **Raises:** the errors of `FlashStore`.
    """
    path, extents = folder / JOURNAL, folder / EXTENTS
    if path.exists():
        journal = Journal(path)
        opened.callback(journal.close)
        journal.settle()
        require_same(folder, journal.records[0].content, described)
        file = ExtentFile(extents, layout.file_bytes, create=False)
        opened.callback(file.close)
        version = Version(layout, file)
        if len(journal.records) == 1:
            return OpenFiles(journal, file, version)
        version.restore(journal.records[-1])
        return OpenFiles(journal, file, version, journal.records[-1])
    size = layout.planned_bytes
    planned = None if size == layout.file_bytes else layout.planned_ranges
    with files.storage_errors(folder, size):
        extents.unlink(missing_ok=True)  # without a journal the file never counted
        files.require_space(extents, size)
        file = ExtentFile(extents, layout.file_bytes, create=True, planned=planned)
        opened.callback(file.close)
        file.sync()  # the file size, on which the journal relies
        durable.sync_folder(folder)
        failpoints.point("flash.before_journal")
        journal = Journal.create(path, Record(described))
        opened.callback(journal.close)
    return OpenFiles(journal, file, Version(layout, file))


def require_masks(program: Holding, masks: MaskRule | None) -> None:
    """Check that a store on flash can have the sparse weights of a program.

    Raises:
        ValueError: there is no mask rule.
    """
    if masks is None and any(weight.is_sparse for weight in program.weights.values()):
        raise ValueError("a store that trains sparse weights needs a mask rule")


def require_flash(
    program: Holding, layout: FlashLayout, division: Division, limit: int | None, keep_steps: int
) -> None:
    """Check the size of a store on flash.

    Args:
        program: the weights.
        layout: of the state.
        division: says how many bytes of gradients are on flash.
        limit: `store.flash.size`; None for no limit.
        keep_steps: durable steps that can be reopened.

    Raises:
        BudgetError: the store is larger than the limit.
    """
    state, gradients = layout.planned_bytes, division.spilled_bytes
    if limit is None or state + gradients <= limit:
        return
    also = f" and {gradients:,} for gradients" if gradients else ""
    advice = ", or raise store.dram, which leaves no room for them" if gradients else ""
    raise BudgetError(
        f"store.flash.size: {program.name} needs {state:,} bytes on flash for {keep_steps + 1} "
        f"versions of its state{also}, the limit is {limit:,}; raise it, or lower "
        f"store.flash.keep_steps{advice}"
    )
