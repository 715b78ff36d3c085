"""What it costs that engines are processes of their own, and what the fabric makes of a copy.

Three loops train the same GPT (4 layers, 1024 wide, 4 micro-batches of 256 tokens, float32, AdamW)
on this machine, in turns, to the same bits: one engine in the trainer's process, which reads the
weights in place; one engine in another process; two engines in two others. The work of a step is
the same for all, and so is the number of threads of an engine, since the last bits depend on it.

    python benchmarks/engines.py [--quick] [--rounds N]

`value` is the median ratio of tokens/s of two engines to one, both in other processes: what scaling
out adds beside the price of another process (`apart`: one engine in another process over one in
the trainer's). `of_memcpy` is the rate of a link between two processes, authenticated,
checksummed on both sides, in chunks as the weights travel, over that of a copy in memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from side_by_side import Worker, print_table, serve, speeds_over, summarize, take_turns

LOOPS = {"two": (2, "local"), "one": (1, "local"), "here": (1, "none")}
LAYERS, MICRO_BATCHES, LENGTH, WIDTH = 4, 4, 256, 1024
LINK_BYTES, CHUNK_BYTES = 512 << 20, 4 << 20


@dataclasses.dataclass(frozen=True)
class Job:
    """What one worker does."""

    loop: str
    layers: int
    folder: str


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1 of 4 layers, two rounds")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    parser.add_argument("--receiver", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(training_loop(Job(**json.loads(options.worker))))
        return
    if options.receiver:
        receive()
        return
    layers, rounds = (1, 2) if options.quick else (LAYERS, 7)
    rounds = options.rounds or rounds
    folder = tempfile.mkdtemp()
    try:
        workers = {loop: Worker(Job(loop, layers, f"{folder}/{loop}"), __file__) for loop in LOOPS}
        seconds = take_turns(workers, rounds)
        found = summarize(workers, seconds, MICRO_BATCHES * LENGTH)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if len(set(found["loss"].values())) != 1:
        raise SystemExit(f"the loops should have the same losses to the bit: {found['loss']}")
    link, memcpy = link_rates(3 if options.quick else 7)
    print_table(
        {"engines": 10, "tokens/s": 9, "two is": 9},
        (
            (
                loop,
                f"{found['tokens_per_second'][loop]:.1f}",
                f"{speeds_over(seconds, 'two')[loop]:.3f}x",
            )
            for loop in LOOPS
        ),
    )
    print(f"a link carries {link:.2f} GB/s, a copy in memory makes {memcpy:.2f} GB/s")
    result = {
        "benchmark": "engines",
        "value": speeds_over(seconds, "two")["one"],
        "unit": "tokens/s of two engines over one, in other processes, same work, same cores",
        "apart": speeds_over(seconds, "one")["here"],
        "of_memcpy": round(link / memcpy, 3),
        "link_gigabytes_per_second": round(link, 2),
        "tokens_per_second": found["tokens_per_second"],
        "layers": layers,
        "rounds": rounds,
    }
    print(json.dumps(result))


def training_loop(job: Job) -> Callable[[], float]:
    """Return a step of a trainer with the loop's engines."""
    from side_by_side.gpt import HEADS, SEED, VOCABULARY

    from penstock.trainer import Trainer

    engines, start = LOOPS[job.loop]
    text = Path(job.folder) / "text.txt"
    text.parent.mkdir(parents=True)
    text.write_text("\n".join(f"{n} water and {n % 7} weights" for n in range(20_000)))
    trainer = Trainer(
        {
            "model": {
                "preset": "gpt2",
                "n_layer": job.layers,
                "n_embd": WIDTH,
                "n_head": HEADS,
                "vocab_size": VOCABULARY,
                "n_positions": LENGTH,
            },
            "data": {"input": [str(text)], "sequence_length": LENGTH},
            "batch": {"size": MICRO_BATCHES, "micro": 1},
            "engines": engines,
            "cluster": {"start": start, "spare": 0},
            "run": {"dir": str(Path(job.folder) / "run"), "seed": SEED, "steps": 1000},
        }
    )
    return lambda: trainer.run_step().loss


def link_rates(rounds: int) -> tuple[float, float]:
    """Return the GB/s of a link between two processes, and of a copy in memory, in turns."""
    from penstock.fabric.messages import Kind, message_with
    from penstock.fabric.sockets import new_token
    from penstock.fabric.sockets.handshake import accept
    from penstock.fabric.sockets.link import Link

    token = new_token()
    listener = socket.create_server(("127.0.0.1", 0))
    receiver = subprocess.Popen(
        [sys.executable, __file__, "--receiver"], stdin=subprocess.PIPE, text=True
    )
    assert receiver.stdin is not None
    receiver.stdin.write(f"{listener.getsockname()[1]} {token}\n")
    receiver.stdin.flush()
    connection, _ = listener.accept()
    accept(connection, token)
    arrived = threading.Semaphore(0)
    link = Link(connection, lambda link, message: arrived.release(), lambda link, error: None)
    source = np.random.default_rng(0).integers(0, 256, LINK_BYTES, np.uint8)
    target = np.zeros(LINK_BYTES, np.uint8)
    chunks = range(0, LINK_BYTES, CHUNK_BYTES)
    rates: dict[str, list[float]] = {"link": [], "memcpy": []}
    for number in range(rounds + 1):
        begin = time.perf_counter()
        for at in chunks:
            part = source[at : at + CHUNK_BYTES]
            link.send(message_with(part, kind=Kind.WEIGHTS, epoch=0, sender=0, chunk=at))
        arrived.acquire()  # the receiver answers when all of it has come
        middle = time.perf_counter()
        for at in chunks:
            target[at : at + CHUNK_BYTES] = source[at : at + CHUNK_BYTES]
        end = time.perf_counter()
        if number:  # the first makes the buffers
            rates["link"].append(LINK_BYTES / (middle - begin) / 1e9)
            rates["memcpy"].append(LINK_BYTES / (end - middle) / 1e9)
    link.close()
    receiver.wait(timeout=30)
    return statistics.median(rates["link"]), statistics.median(rates["memcpy"])


def receive() -> None:
    """Take chunks over a link, put them in their place, and answer when all have come."""
    from penstock.fabric.messages import Kind, Message
    from penstock.fabric.sockets.handshake import connect
    from penstock.fabric.sockets.link import Link

    port, token = sys.stdin.readline().split()
    connection = socket.create_connection(("127.0.0.1", int(port)))
    connect(connection, token)
    target = np.zeros(LINK_BYTES, np.uint8)
    ended = threading.Event()
    count = 0

    def take(link: Link, message: Message) -> None:
        nonlocal count
        assert message.payload is not None
        target[message.chunk : message.chunk + message.size] = message.payload
        count += 1
        if count % (LINK_BYTES // CHUNK_BYTES) == 0:
            link.send(Message(Kind.RELEASED, 0, 1))

    Link(connection, take, lambda link, error: ended.set())
    ended.wait()


if __name__ == "__main__":
    main()
