"""Who takes part in an epoch, in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ProtocolError


@dataclass(frozen=True)
class View:
    """The shards and engines of an epoch by their numbers; the order is their place."""

    shards: tuple[int, ...]
    engines: tuple[int, ...]

    def as_body(self) -> dict[str, Any]:
        """Return it as the body of a message."""
        return {"shards": list(self.shards), "engines": list(self.engines)}

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> View:
        """Return the view that a body says.

        **Raises:** `ProtocolError` if it says none.
        """
        parts = [body.get("shards"), body.get("engines")]
        for part in parts:
            are_numbers = isinstance(part, list) and all(isinstance(n, int) for n in part)
            if not part or not are_numbers or len({*part}) < len(part):
                raise ProtocolError(f"a view has nodes {str(part)[:80]!r}")
        shards, engines = (tuple(part) for part in parts if part)
        return cls(shards, engines)
