"""`RUN/cluster.json`: the address and token of a run, for users who may read the run's folder."""

import contextlib
import json
import os
from pathlib import Path

from penstock.distributed.transport import Address
from penstock.errors import ConfigError
from penstock.io import read_plain

NAME = "cluster.json"
_MOST_BYTES = 4096


def write_record(run: Path, address: Address, token: str) -> Path:
    """Write the rendezvous file of a listening run; only this user may read it.

    The file appears atomically: workers may be polling for it.
    """
    run.mkdir(parents=True, exist_ok=True)
    path, new = run / NAME, run / f"{NAME}.new"
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"address": list(address), "token": token, "pid": os.getpid()}, file)
    return new.replace(path)


def remove_record(path: Path, token: str) -> None:
    """Remove the rendezvous file of a run that has stopped listening; keep another run's file."""
    with contextlib.suppress(ConfigError):
        if read_record(path)[1] == token:
            path.unlink(missing_ok=True)


def read_record(path: Path) -> tuple[Address, str]:
    """Return the address and the token in a rendezvous file.

    Raises:
        ConfigError: the file is missing or malformed, or names a port that cannot exist.
    """
    try:
        content = json.loads(read_plain(path, _MOST_BYTES))
        host, port = content["address"]
        token = content["token"]
        if not (isinstance(host, str) and isinstance(token, str)):
            raise ValueError
    except OSError as error:
        raise ConfigError(
            f"{path}: expected the rendezvous file of a run: {error.strerror}"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path}: expected the rendezvous file of a run, with its address and token, got other "
            "content; start the run again, which writes a new file"
        ) from None
    if type(port) is not int or not 0 < port < 1 << 16:  # the system would drop higher bits
        raise ConfigError(
            f"{path}: expected a port from 1 to 65535, got {str(port)[:40]!r}; start the run "
            "again, which writes a new file"
        )
    return (host, port), token
