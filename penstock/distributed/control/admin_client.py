"""The client of `penstock scale`: sends a request from another process to a running trainer."""

import queue
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import no_such_run
from penstock.distributed import rendezvous_file
from penstock.distributed.protocol import Message, MessageType
from penstock.distributed.transport import Endpoint, own_host
from penstock.errors import ClusterError, ConfigError, ProtocolError

_SECONDS = 10.0  # time limit for the reply


@dataclass(frozen=True)
class Scaled:
    """The wanted numbers of engines and relays of a run: before a request, and from its next step
    on. Without a change also how many of them are ready; those do not count that still start."""

    engines_before: int
    engines: int
    relays_before: int
    relays: int
    engines_ready: int = 0
    relays_ready: int = 0


def scale(run: Path, engines: int | None = None, relays: int | None = None) -> Scaled:
    """Set a running trainer's number of engines, of relays, or both, from its next step on.

    Without a number of engines it stays; without one of relays it follows from `fabric.relays`.
    Without both nothing changes: the result has the wanted numbers, and those that are ready.

    Raises:
        ConfigError: the run does not exist, is not training, or cannot have these numbers.
        ClusterError: the run does not answer.
    """
    if not run.is_dir():
        raise no_such_run(run)
    path = run / rendezvous_file.NAME
    if not path.exists():
        if engines is None:
            given = "engines=NUMBER" if relays is None else f"fabric.relays={relays}"
        else:
            given = f"engines={engines}"
        raise ConfigError(
            f"{run}: expected a run that is training now, with cluster.start other than none; the "
            f"folder has no {rendezvous_file.NAME}. To change the number when the run is started, "
            f"give {given} to penstock train"
        )
    reply = _request(run, {"engines": engines, "relays": relays})
    is_question = engines is None and relays is None
    if "error" in reply:
        hint = "; does the run use the same version of Penstock?" if is_question else ""
        raise ConfigError(f"{run}: {reply['error']}{hint}")
    keys = ["before", "engines", "relays_before", "relays"]
    keys += ["engines_ready", "relays_ready"] if is_question else []
    numbers = [number for key in keys if type(number := reply.get(key)) is int]
    if len(numbers) < len(keys):
        raise ProtocolError(
            f"{run}: expected the numbers of engines and relays in the reply, got "
            f"{str(reply)[:80]!r}; does the run use the same version of Penstock?"
        )
    return Scaled(*numbers)


def _request(run: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
    address, token = rendezvous_file.read_record(run / rendezvous_file.NAME)
    replies: queue.SimpleQueue[Mapping[str, Any] | Exception] = queue.SimpleQueue()
    endpoint = Endpoint(
        token,
        own_host(address),
        on_connection_end=lambda connection, error: replies.put(error),
        on_new_peer=lambda connection, message: replies.put(message.body),
        on_failure=replies.put,
    )
    endpoint.start()
    try:
        connection = endpoint.connect(address)
        connection.send(Message(MessageType.ADMIN_REQUEST, 0, 0, body=request))
        reply = replies.get(timeout=_SECONDS)
    except ClusterError as error:
        raise ClusterError(
            f"{run}: the run is not training now, or this machine cannot reach it: {error}"
        ) from None
    except queue.Empty:
        raise ClusterError(
            f"{run}: the run did not reply within {_SECONDS:.0f} s; try again"
        ) from None
    finally:
        endpoint.close()
    if isinstance(reply, Exception):
        raise ClusterError(f"{run}: the run closed the connection without a reply ({reply})")
    return reply
