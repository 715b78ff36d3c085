"""Encoding and decoding in a separate process with limited memory (`tokenizer_worker`)."""

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import DataError

# Twice the measured value, 190, for tokens of one byte each, the most that a text can have.
MEMORY_PER_BYTE = 384
LEAST_BYTES = 512 << 20
_WORKER = Path(__file__).with_name("tokenizer_worker.py")


class ContainedTokenizer:
    """A tokenizer of the `tokenizers` library, in a process that is started at first use.

    Args:
        content: the content of `tokenizer.json`.
        name: the name shown to users.

    Its methods may be called from several threads.
    """

    def __init__(self, content: str, name: str) -> None:
        self._content, self._name = content, name
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, uint32 [n].

        Raises:
            DataError: the tokenizer fails on one of them, or exceeds its memory limit.
        """
        contents = [text.encode() for text in texts]
        return [np.frombuffer(part, np.uint32) for part in self._ask("encode", contents)]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of `ids`; errors as of `encode`."""
        (text,) = self._ask("decode", [ids.astype(np.uint32).tobytes()])
        return text.decode()

    def _ask(self, what: str, parts: Sequence[bytes]) -> list[bytes]:
        size = sum(map(len, parts))
        most = max(LEAST_BYTES, size * MEMORY_PER_BYTE)
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                return self._exchange(what, parts, most)
            except DataError:
                raise  # it has answered, and accepts the next request
            except (OSError, EOFError, ValueError) as error:
                raise self._died(what, size, most, error) from error
            except BaseException:  # such as Ctrl-C: the next request would receive this answer
                self._leave()
                raise

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a panic prints its backtrace there
            env={**os.environ, "TOKENIZERS_PARALLELISM": "true"},
        )
        weakref.finalize(self, _end, self._process)
        try:
            self._exchange("load", [self._content.encode()], 0)
        except DataError:
            self._leave()  # it has no tokenizer
            raise

    def _exchange(self, what: str, parts: Sequence[bytes], more_bytes: int) -> list[bytes]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        sizes = [len(part) for part in parts]
        request = {"what": what, "sizes": sizes, "more_bytes": more_bytes}
        process.stdin.write(json.dumps(request).encode() + b"\n" + b"".join(parts))
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline() or _ended())
        if "error" in answer:
            raise DataError(
                f"tokenizer {self._name} failed on the text ({answer['error']}); use another "
                "tokenizer, or correct its regular expressions"
            )
        return [_read(process.stdout, size) for size in answer["sizes"]]

    def _leave(self) -> "subprocess.Popen[bytes] | None":
        """End the process, if there is one, and return it; the next request starts another
        process."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)
        return process

    def _died(self, what: str, size: int, most: int, error: Exception) -> DataError:
        process = self._leave()
        if process is None:
            why = error.strerror if isinstance(error, OSError) else error
            return DataError(f"the process of tokenizer {self._name} did not start: {why}")
        how = f"ended with {process.returncode}"
        return DataError(
            f"tokenizer {self._name} could not {what} {size:,} bytes within {most >> 20:,} MiB of "
            f"memory: its process {how}; use another tokenizer, or shorter documents"
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # unsent data for a process that has ended
                continue
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ended() -> bytes:
    raise EOFError


def _read(file: Any, size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise EOFError
    return content
