"""`fabric`: the processes between store and engines."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from penstock.config.section import Section, setting

MOST_RELAYS = 4096


def _count_or_auto(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 0 <= value <= MOST_RELAYS):
        return value
    raise PydanticCustomError(
        "count",
        "expected a whole number from 0 to {most}, or auto, got {got}",
        {"most": MOST_RELAYS, "got": repr(value)},
    )


class FabricConfig(Section):
    """Relays forward weights to the engines and add their gradients; no bit of a result changes."""

    relays: Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)] = setting(
        "auto",
        "processes that forward weights and add gradients, so that an engine's link carries its "
        "own weights and gradients only. auto: as many as keep up with the engines' links, "
        "in a Ray cluster with a host for each of them and each engine; else none",
        unit="relays",
    )
