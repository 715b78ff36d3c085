"""Bodies of the messages by which processes join a run and report their state.

Peers have the run's token, so a malformed body is a defect or comes from another version of
Penstock. The reader refuses a malformed body and closes the sender's connection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

from penstock.distributed.protocol import Message, message_validation
from penstock.distributed.run_spec import are_terms
from penstock.distributed.transport import Address
from penstock.errors import ProtocolError

Opens = Literal["when asked", "what was left", "empty"]

Role = Literal["engine", "shard", "relay"]

_LONGEST_NAME = 200  # characters of a name
_MOST_NODE_DIGITS = 10  # of a node number, which a header holds in 32 bits


@dataclass(frozen=True)
class Join:
    """A request to join: the worker's name, listening address, and requested role.

    `role` is None for a process that accepts any role. `shard` is None for a process that
    accepts any shard.
    """

    worker: str
    address: Address
    role: Role | None
    shard: int | None

    @classmethod
    def read(cls, message: Message) -> Join:
        """Return the content of a `JOIN`.

        **Raises:** `ProtocolError` if the body is malformed.
        """
        body = message.body
        worker, role, shard = body.get("worker"), body.get("role"), body.get("shard")
        if not isinstance(worker, str) or len(worker) > _LONGEST_NAME:
            expected = f"a name of at most {_LONGEST_NAME} characters"
            raise _invalid(message, "worker", worker, expected)
        if role not in (None, *get_args(Role)):
            raise _invalid(message, "role", role, "'engine', 'shard', 'relay' or nothing")
        if shard is not None:
            shard = message_validation.integer(message, "shard", 0)
        return cls(worker, address_of(message, body.get("listens")), role, shard)


@dataclass(frozen=True)
class Assignment:
    """The assignment of a process: node number, role, replica slot of a shard, run specification.

    `opens` says how a shard opens its store: `when asked` at the start of a run; `what was left` as
    the replacement of a lost last holder; `empty` to receive a copy from another holder.
    `shards_there` are the shard nodes inside the sender's process. The run specification is made by
    `run_spec.py`.
    """

    node: int
    role: Role
    slot: ReplicaSlot | None
    opens: Opens
    run: Mapping[str, Any]
    shards_there: tuple[int, ...]

    @classmethod
    def read(cls, message: Message) -> Assignment:
        """Return the content of an `ASSIGN`.

        **Raises:** `ProtocolError` if the body is malformed.
        """
        body = message.body
        nodes = body.get("shards_there")
        if not isinstance(nodes, list) or not all(type(node) is int for node in nodes):
            raise _invalid(message, "shards_there", nodes, "a list of node numbers")
        if not are_terms(body.get("run")):
            raise _invalid(message, "run", body.get("run"), "the specification of a run")
        node, slot = (
            message_validation.integer(message, "node", 1),
            _slot_of(message, body.get("place")),
        )
        role = _role_of(message, body.get("role"))
        if (role == "shard") != (slot is not None):
            raise _invalid(message, "place", slot, "a shard and a replica for a shard only")
        return cls(node, role, slot, _opens_of(message), body["run"], tuple(nodes))


@dataclass(frozen=True)
class WorkerMetrics:
    """The metrics in an engine's heartbeat: memory and computing time.

    `computed` is in seconds, over `micro_batches`, both since the engine joined.
    """

    peak_bytes: int = 0
    computed: float = 0.0
    micro_batches: int = 0

    @classmethod
    def read(cls, message: Message) -> WorkerMetrics | None:
        """Return the metrics of a `HEARTBEAT`; None for a shard or a relay, which have none.

        **Raises:** `ProtocolError` if the body is malformed.
        """
        body = message.body
        if "computed" not in body:
            return None
        peak, computed = message_validation.integer(message, "peak_bytes", 0), body["computed"]
        if not isinstance(computed, list) or len(computed) != 2:
            raise _invalid(message, "computed", computed, "two numbers")
        seconds, count = computed
        if not _is_number(seconds) or not _is_number(count) or seconds < 0 or count < 0:
            raise _invalid(message, "computed", computed, "two numbers of at least 0")
        return cls(peak, float(seconds), int(count))


def addresses_of(message: Message) -> dict[int, Address]:
    """Return the nodes' listening addresses in a `VIEW`, by node number.

    **Raises:** `ProtocolError` if the body is malformed.
    """
    value = message.body.get("addresses", {})
    if not isinstance(value, Mapping) or not all(_is_node(key) for key in value):
        raise _invalid(message, "addresses", value, "addresses by node number")
    return {int(key): address_of(message, address) for key, address in value.items()}


def address_of(message: Message, value: Any) -> Address:
    """Return the address in a part of a body.

    **Raises:** `ProtocolError` if the part is not an address.
    """
    match value:
        case [str(host), int(port)] if len(host) <= _LONGEST_NAME and 0 < port < 1 << 16:
            return host, port
    raise _invalid(message, "address", value, "a host and a port")


def _opens_of(message: Message) -> Opens:
    value = message.body.get("opens")
    for known in get_args(Opens):
        if value == known:
            return cast(Opens, known)
    raise _invalid(message, "opens", value, f"one of {', '.join(map(repr, get_args(Opens)))}")


def _role_of(message: Message, value: Any) -> Role:
    for known in get_args(Role):
        if value == known:
            return cast(Role, known)
    raise _invalid(message, "role", value, f"one of {', '.join(map(repr, get_args(Role)))}")


def _slot_of(message: Message, value: Any) -> ReplicaSlot | None:
    match value:
        case None:
            return None
        case [int(shard), int(replica)] if shard >= 0 and replica >= 0:
            return ReplicaSlot(shard, replica)
    raise _invalid(message, "place", value, "a shard and a replica, or nothing")


def _invalid(message: Message, key: str, value: Any, expected: str) -> ProtocolError:
    """Return the error for an invalid value in a body."""
    return message_validation.refuse(
        message, f"has {str(value)[:40]!r} as {key!r}, expected {expected}"
    )


def _is_node(key: str) -> bool:
    return key.isdecimal() and len(key) <= _MOST_NODE_DIGITS


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class ReplicaSlot(NamedTuple):
    """One replica of one shard."""

    shard: int
    replica: int
