"""The file names of a flash store, and the first record of its journal: format and purpose."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.store.flash.layout import FlashLayout
from penstock.store.flash.unit_description import described_format
from penstock.weight_formats import BFLOAT16, DENSE, PACKED, PACKED_SPLIT, SPLIT

JOURNAL, EXTENTS = "journal", "extents"

FORMAT = "penstock-flash"
VERSION = 4
_WITHOUT_MASKS = 3  # stores without sparse weights
_WITHOUT_FORMATS = 2  # stores of dense and split weights are still written in this version
_KEPT_AS = {
    DENSE.name: "fp32",
    SPLIT.name: "fp32, of which bf16 streams",
    BFLOAT16.name: "bf16, frozen",
    PACKED.name: "fp32, sparse",
    PACKED_SPLIT.name: "fp32, of which bf16 streams, sparse",
}


def describe(
    layout: FlashLayout, block_elements: int, keep_steps: int, store_id: str | None
) -> dict[str, Any]:
    """Return the record's content. In a shard, `store` names the store that the shard belongs
    to."""
    return {
        **({} if store_id is None else {"store": store_id}),
        "format": FORMAT,
        "version": _version_of(layout),
        "block_elements": block_elements,
        "keep_steps": keep_steps,
        "units": layout.described(),
    }


def _version_of(layout: FlashLayout) -> int:
    """Return the oldest version that can describe a layout."""
    if layout.sparse:
        return VERSION
    is_old = all(unit.format in (DENSE, SPLIT) for unit in layout.units)
    return _WITHOUT_FORMATS if is_old else _WITHOUT_MASKS


class OtherStoreError(ConfigError):
    """The store on flash was made for another program or with other settings."""


def require_same(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Reject a store that was made for something else; the message names the differences.

    Raises:
        OtherStoreError: the store was made for another program or with other settings.
        ConfigError: the record describes no store, or a store of a newer format.
    """
    require_readable(folder, found)
    difference = _difference(found, wanted)
    if difference is not None:
        raise OtherStoreError(f"{folder} {difference}")


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Return as text how a store differs from the wanted store, and what to do."""
    old, new = found.get("units"), wanted["units"]
    if old != new:
        return _unit_difference(old, new)
    steps = str(found.get("keep_steps"))[:40]
    if found.get("keep_steps") != wanted["keep_steps"]:
        return (
            f"was created to keep {steps} durable steps, the configuration says "
            f"{wanted['keep_steps']}; set store.flash.keep_steps to {steps}"
        )
    for key in wanted:
        if found.get(key) != wanted[key]:
            return (
                f"was created with {key} {str(found.get(key))[:40]}, this Penstock uses "
                f"{wanted[key]}"
            )
    return None


def _unit_difference(old: Any, new: Sequence[Mapping[str, Any]]) -> str:
    other = "holds the state of another model or optimizer"
    advice = (
        "choose another store.flash.path, or use the model and the optimizer that it was created "
        "with"
    )
    try:
        was, now = _by_weight(old), _by_weight(new)
        stages, stages_now = _stages(old), _stages(new)
    except (TypeError, KeyError, AttributeError):
        return f"{other}: its first record does not name them; {advice}"
    for name in dict.fromkeys([*was, *now]):
        if name not in now or name not in was:
            where = "the store, not in the model" if name in was else "the model, not in the store"
            return f"{other}: {name!r} is in {where}; {advice}"
        for key, before in was[name].items():
            after = now[name][key]
            if before != after:
                return f"{other}: {name!r}: {key} {str(before)[:200]} there, {after} now; {advice}"
    return (
        f"holds the state of this model, divided into other stages ({stages} stages with weights "
        f"in the store, {stages_now} now): engine.memory or the free memory has changed; set "
        "engine.memory to the value that the run was started with"
    )


def _by_weight(units: Any) -> dict[str, dict[str, Any]]:
    """Return the description of each weight as text for users."""
    return {
        name: {
            "shape": list(shape),
            "first element": unit.get("origins", {}).get(name, 0),
            "trainable": unit["trainable"],
            "kept as": _KEPT_AS[described_format(unit).name],
            "room for entries": unit.get("capacity", "all"),
            "optimizer state": ", ".join(f"{r['name']} ({r['dtype']})" for r in unit["roles"])
            or "none",
        }
        for unit in units
        for name, shape in unit["weights"].items()
    }


def _stages(units: Any) -> int:
    return len({unit["stage"] for unit in units})


def require_readable(folder: Path, found: Mapping[str, Any]) -> None:
    """Reject a journal's first record of another format, or of a newer format."""
    if found.get("format") != FORMAT:
        raise ConfigError(f"{folder}: not a Penstock store; choose another store.flash.path")
    version = found.get("version")
    if version not in (_WITHOUT_FORMATS, _WITHOUT_MASKS, VERSION):
        newer = isinstance(version, int) and version > VERSION
        raise ConfigError(
            f"{folder}: its format has version {version}, this Penstock reads "
            f"{_WITHOUT_FORMATS} to {VERSION}; open it with "
            + ("a newer version" if newer else "the version that created it")
        )
