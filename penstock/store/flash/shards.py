"""A folder on flash that contains a sharded store: `shards.json`, and one folder per shard.

Every shard has its own journal. A crash between two shards leaves some at the newest durable step
and others at the previous one. All shards must open at the newest step that every shard holds:
shards that are ahead are rolled back before any shard is opened. A shard may have replicas, each in
a folder beside its own. A shard holds a step if one of its replicas holds it; the other replicas
receive a copy later.

The store's name, drawn at creation, identifies the shards of one store: the name is in
`shards.json` and in every shard's journal. Stores of releases before these names have none.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, CorruptionError
from penstock.io import durable
from penstock.store import files, sealed_json
from penstock.store.flash.description import JOURNAL, OtherStoreError
from penstock.store.flash.journal import Journal, Record, read_records
from penstock.store.flash.version import recorded_step

SHARDS = "shards.json"
MOST_SHARDS = 64
MOST_REPLICAS = 2

FORMAT, VERSION = "penstock-shards", 2
_WITHOUT_ID = 1
_SHARD = "shard-"
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Shards:
    """The content of `shards.json`: the number of shards, and the shapes of the whole weights.

    `store_id` identifies the store in all its shards; None for a store of an older release.
    """

    folder: Path
    count: int
    shapes: Mapping[str, tuple[int, ...]]
    store_id: str | None

    @classmethod
    def new(cls, folder: Path, count: int, shapes: Mapping[str, tuple[int, ...]]) -> Shards:
        """Return the description of a new store."""
        return cls(folder, count, shapes, secrets.token_hex(16))

    @property
    def folders(self) -> list[Path]:
        return [shard_folder(self.folder, number) for number in range(self.count)]

    @property
    def copies(self) -> list[list[Path]]:
        """For each shard its folder and the existing folders of its replicas."""
        found = []
        for number in range(self.count):
            first, *others = (shard_folder(self.folder, number, r) for r in range(MOST_REPLICAS))
            found.append([first, *(other for other in others if other.is_dir())])
        return found

    def write(self) -> None:
        """Write the description to disk; durable on return."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "id": self.store_id,
            "shards": self.count,
            "weights": {name: list(shape) for name, shape in self.shapes.items()},
        }
        data = sealed_json.seal(content)
        with files.storage_errors(self.folder, len(data)):
            durable.replace_file(self.folder / SHARDS, data, "shards")


def shard_folder(folder: Path, shard: int, replica: int = 0) -> Path:
    """Return the folder of a shard, or of a replica of it."""
    return folder / f"{_SHARD}{shard}{f'-replica-{replica}' if replica else ''}"


def read_shards(folder: Path) -> Shards | None:
    """Return the description of the shards in a folder; None if it contains no shards.

    Raises:
        ConfigError: a newer penstock wrote it.
        CorruptionError: its bytes have changed, or it does not describe shards.
    """
    path = folder / SHARDS
    try:
        content = sealed_json.unseal(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    version = content.get("version")
    if content.get("format") == FORMAT and type(version) is int and version > VERSION:
        raise ConfigError(
            f"{path}: its format has version {version}, this Penstock reads {VERSION}; open it "
            "with a newer version"
        )
    match content:
        case {"format": format_, "shards": int(count), "weights": dict(weights)} if (
            format_ == FORMAT
            and (_is_id(content.get("id")) or (version == _WITHOUT_ID and "id" not in content))
            and type(count) is int
            and 1 <= count <= MOST_SHARDS
            and all(_is_shape(shape) for shape in weights.values())
        ):
            shapes = {name: tuple(shape) for name, shape in weights.items()}
            return Shards(folder, count, shapes, content.get("id"))
    raise CorruptionError(f"{path}: expected a description of shards; restore the file from a copy")


def store_id_of(folder: Path) -> str | None:
    """Return the store that a new shard in `folder` belongs to; None if the store is not sharded.

    Raises:
        CorruptionError: the description of the shards has changed.
    """
    shards = read_shards(folder.parent) if folder.name.startswith(_SHARD) else None
    return None if shards is None else shards.store_id


def require_one_store(shards: Shards) -> None:
    """Reject folders that were put together from different stores.

    Raises:
        CorruptionError: a shard belongs to another store.
    """
    for folder in itertools.chain.from_iterable(shards.copies):
        journal = folder / JOURNAL
        if os.path.lexists(journal):
            first = read_records(journal)[0][0]
            if first.content.get("store") != shards.store_id:
                raise of_another_store(shards, folder)


def of_another_store(shards: Shards, folder: Path) -> CorruptionError:
    """Return the error for a shard that belongs to another store."""
    return CorruptionError(
        f"{folder} is a shard of another store than the one that {shards.folder / SHARDS} "
        "describes, though of the same model; restore all shards from one copy"
    )


def _is_id(found: object) -> bool:
    return isinstance(found, str) and _ID.fullmatch(found) is not None


def _is_shape(found: object) -> bool:
    if not isinstance(found, list) or len(found) > 64:
        return False
    return all(type(length) is int and 0 <= length < 2**63 for length in found)


def require_shards(folder: Path, count: int) -> Shards | None:
    """Return the description of the shards in a folder; None if the folder is new or unsharded.

    Raises:
        OtherStoreError: the folder contains a store in another number of shards.
    """
    found = read_shards(folder)
    held = found.count if found else 1 if os.path.lexists(folder / JOURNAL) else None
    if held is None or held == count:
        return found
    raise OtherStoreError(
        f"{folder} holds a store in {_shards(held)}, the configuration says {count}; set "
        f"store.shards to {held}, or start another run in another store.flash.path (a run in "
        "memory continues from its checkpoints with any number)"
    )


def require_no_journal(folder: Path) -> None:
    """Reject a folder with a store without shards, beside which a single shard would be created.

    Raises:
        OtherStoreError: it contains one.
    """
    if os.path.lexists(folder / JOURNAL):
        raise OtherStoreError(
            f"{folder} holds a store that the trainer process opens itself, the configuration says "
            "cluster.shards: apart; set cluster.shards to here, or choose another store.flash.path"
        )


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count} shards"


def durable_records(folder: Path) -> list[Record]:
    """Return the records of one shard's durable steps that can be opened, oldest first."""
    journal = folder / JOURNAL
    if not os.path.lexists(journal):
        return []
    first, *records = read_records(journal)[0]
    keep = first.content.get("keep_steps")
    if type(keep) is not int or keep < 1:
        raise CorruptionError(f"{journal}: its first record does not describe a store")
    return records[-keep:]


def common_step(shards: Shards, steps: Sequence[Sequence[int]]) -> int | None:
    """Return the newest step that all shards hold; None if no step was trained yet.

    Raises:
        CorruptionError: steps were trained, but no step is held by all shards.
    """
    common = set(steps[0]).intersection(*steps[1:])
    if common:
        return max(common)
    if all(set(held) <= {0} for held in steps):
        return None  # killed while the first weights were loaded
    held = "; ".join(
        f"{folder.name} holds {', '.join(map(str, some)) or 'none'}"
        for folder, some in zip(shards.folders, steps, strict=True)
    )
    raise CorruptionError(
        f"{shards.folder}: no durable step that all shards hold: {held}; restore all shards from "
        "one copy"
    )


def recorded_together(shards: Shards) -> dict[str, Any] | None:
    """Return the data kept with the newest step that all shards hold; None if there is no such
    step."""
    require_one_store(shards)
    found = _recorded(shards)
    step = _common(shards, found)
    if step is None:
        return None
    return next(found[folder][step] for folder in shards.copies[0] if step in found[folder])


def whole_folders(shards: Shards) -> list[Path]:
    """Return for each shard the first folder that holds the newest step that all shards hold.

    If that is unknown, because a journal is damaged or missing, the result is the shard's own
    folder.
    """
    try:
        found = _recorded(shards)
        step = _common(shards, found)
    except CorruptionError:
        return shards.folders
    return [
        next((folder for folder in copies if step in found[folder]), copies[0])
        for copies in shards.copies
    ]


def agree_on_step(shards: Shards, replicas: int = 1) -> None:
    """Roll back the shards that are ahead to the newest step that all shards hold.

    Replicas without this step are emptied, so that they open as new. Only while no shard is open.
    After a crash on the way, the next open repeats the rollback.

    Raises:
        CorruptionError: no step is held by all shards, or two replicas of the step differ.
        OtherStoreError: the step requires more replicas than are configured.
    """
    found = _recorded(shards)
    step = _common(shards, found)
    for number, copies in enumerate(shards.copies):
        if step is not None:
            _require_open(shards, number, [f for f in copies if step in found[f]], step, replicas)
        for folder in copies:
            if found[folder] and [*found[folder]][-1] != step:
                go_back(folder, step if step in found[folder] else None)


def _recorded(shards: Shards) -> dict[Path, dict[int, dict[str, Any]]]:
    """Return the durable steps in every folder."""
    return {folder: recorded_steps(folder) for copies in shards.copies for folder in copies}


def _common(shards: Shards, found: Mapping[Path, Collection[int]]) -> int | None:
    by_shard = [sorted(set().union(*(found[f] for f in copies))) for copies in shards.copies]
    return common_step(shards, by_shard)


def _require_open(
    shards: Shards, number: int, holding: Sequence[Path], step: int, replicas: int
) -> None:
    """Check that a folder with this step will be opened, and that all such folders are equal."""
    opened = [shard_folder(shards.folder, number, replica) for replica in range(replicas)]
    if not set(opened).intersection(holding):
        raise OtherStoreError(
            f"{shards.folder}: step {step} of shard {number} is only in {holding[0].name}; "
            f"continue training with store.replicas: {MOST_REPLICAS}, which copies the step to the "
            "shard's own folder"
        )
    records = [
        next(r for r in durable_records(folder) if r.content["step"] == step) for folder in holding
    ]
    for folder, record in zip(holding[1:], records[1:], strict=True):
        if record.blob != records[0].blob:  # the checksums of all weights and all state
            raise CorruptionError(
                f"{shards.folder}: {holding[0].name} and {folder.name} both hold step {step} but "
                f"differ. Run `penstock inspect`: if it reports no damage, delete {folder.name}, "
                f"otherwise delete {holding[0].name}; the run creates the deleted folder again"
            )


def go_back(folder: Path, step: int | None) -> None:
    """Durably remove the steps of a shard after `step`; all of them for None. Only while it is
    closed."""
    kept = [
        record
        for record in durable_records(folder)
        if step is not None and record.content["step"] <= step
    ]
    journal = Journal(folder / JOURNAL)
    try:
        journal.keep_only(kept)
    finally:
        journal.close()


def forget(folder: Path) -> None:
    """Durably remove the whole content of a shard's folder, in any state. Only while it is
    closed."""
    with files.storage_errors(folder, 0):
        if folder.is_dir():
            (folder / JOURNAL).unlink(missing_ok=True)  # without the journal the extents are unused
            durable.sync_folder(folder)  # a killed process may have removed it


def recorded_steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the durable steps of a shard, oldest first, and the data kept with each."""
    return dict(recorded_step(folder / JOURNAL, record) for record in durable_records(folder))
