"""A process that encodes and decodes with an untrusted tokenizer.

A `tokenizer.json` is a program: its normaliser can write a gigabyte for one word, and its regular
expressions can cause a panic of the library. A separate process with a memory limit protects the
run from both. The process runs this file alone and imports nothing of Penstock.

Requests arrive on standard input, responses leave on standard output. Each is a line of JSON,
followed by the bytes that the line announces. A request is `load` with a tokenizer, `encode` with
UTF-8 texts, or `decode` with ids. A response contains the tokens or the text, or an `error`.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from typing import Any, BinaryIO

import numpy as np

_LOOK_SECONDS = 1.0


def main() -> None:
    """Answer requests until the end of standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    worker = _TokenizerWorker()
    while line := requests.readline():
        request = json.loads(line)
        content = requests.read(sum(request["sizes"]))
        try:
            answer, parts = worker.answer(request, content)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no `Exception`
            answer, parts = {"error": str(error) or type(error).__name__}, []
        _write(answers, answer, parts)


def _end_with(parent: int) -> None:
    """End this process when its parent has ended: encoding a text may never end."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


class _TokenizerWorker:
    def __init__(self) -> None:
        self._tokenizer: Any = None

    def answer(self, request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], list[bytes]]:
        if request["what"] == "load":
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_str(content.decode())
            tokenizer.no_padding()
            tokenizer.no_truncation()
            tokenizer.encode_special_tokens = True
            self._tokenizer = tokenizer
            return {}, []
        _limit_memory(request["more_bytes"])
        if request["what"] == "decode":
            ids = np.frombuffer(content, np.uint32).tolist()
            return {}, [self._tokenizer.decode(ids, skip_special_tokens=False).encode()]
        texts, begin = [], 0
        for size in request["sizes"]:
            texts.append(content[begin : begin + size].decode())
            begin += size
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return {}, [np.array(one.ids, np.uint32).tobytes() for one in encoded]


def _limit_memory(more_bytes: int) -> None:
    """Limit this process to its present memory plus this amount; beyond the limit, the library
    aborts.

    Memory that threads only reserve does not count, unlike with a limit on the address space. No
    limit is set if the system does not report the present memory.
    """
    used = None
    with contextlib.suppress(FileNotFoundError), open("/proc/self/status") as status:
        used = next((int(line.split()[1]) << 10 for line in status if line[:7] == "VmData:"), None)
    if used is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + more_bytes
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _write(file: BinaryIO, answer: dict[str, Any], parts: list[bytes]) -> None:
    sizes = [len(part) for part in parts]
    file.write(json.dumps({**answer, "sizes": sizes}).encode() + b"\n")
    for part in parts:
        file.write(part)
    file.flush()


if __name__ == "__main__":
    main()
