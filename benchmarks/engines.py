"""What it costs that engines are processes of their own, and what the fabric makes of a copy.

Loops train the same GPT (4 layers, 1024 wide, 4 micro-batches of 256 tokens, float32, AdamW) on
this machine, in turns, to the same bits: one engine in the trainer's process, which reads the
weights in place; one engine in another process; two engines in two others; these two again with
sockets in place of shared memory (`cluster.shared_memory: off`). The work of a step is the same for
all, and so is the number of threads of an engine, since the last bits depend on it.

    python benchmarks/engines.py [--quick] [--rounds N] [--links | --relays]

`value` is the median ratio of tokens/s of two engines to one, both in other processes: what scaling
out adds beside the price of another process (`apart`: one engine in another process over one in
the trainer's). `of_memcpy` is the rate of a link between two processes through shared memory,
authenticated, checksummed on both sides, in chunks as the weights travel, over that of a copy in
memory; `sockets_of_memcpy` that of a link which uses its socket alone; `tls_of_memcpy` that of one
which is encrypted, as between hosts, over the same socket. What they and the copy take of processor
time is said beside: on a machine with other work it is the steadier figure.

`--relays` compares two and four engines with the same and as many relays, all on this machine: what
the copies, checksums and additions of relays cost where they relieve no link. `value` is then the
lesser ratio of tokens/s with relays to without.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import queue
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
from contract import describe_machine, limits_of_this_machine, print_limits, print_result
from side_by_side import (
    Worker,
    median_ratio,
    print_table,
    serve,
    speeds_over,
    summarize,
    take_turns,
)

LOOPS = {
    "two": (2, "local", "auto"),
    "one": (1, "local", "auto"),
    "here": (1, "none", "auto"),
    "one, sockets": (1, "local", "off"),
    "two, sockets": (2, "local", "off"),
}
RELAY_LOOPS = {
    "two": (2, "local", "auto"),
    "two, relays": (2, "local", "auto", 2),
    "four": (4, "local", "auto"),
    "four, relays": (4, "local", "auto", 4),
}
LAYERS, MICRO_BATCHES, LENGTH, WIDTH = 4, 4, 256, 1024
LINK_BYTES, CHUNK_BYTES = 256 << 20, 4 << 20
WAYS = ("shared", "sockets", "tls")  # of a link's payloads


@dataclasses.dataclass(frozen=True)
class Job:
    """What one worker does."""

    loop: str
    layers: int
    length: int
    folder: str
    with_relays: bool = False  # of RELAY_LOOPS


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1 of 4 layers, 64 tokens, two rounds")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    parser.add_argument("--links", action="store_true", help="links alone, no training")
    parser.add_argument("--relays", action="store_true", help="two and four engines with relays")
    parser.add_argument("--receiver", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(training_loop(Job(**json.loads(options.worker))))
        return
    if options.receiver:
        receive(options.receiver)
        return
    layers, length, rounds = (1, 64, 2) if options.quick else (LAYERS, LENGTH, 7)
    rounds = options.rounds or rounds
    machine = describe_machine()
    if options.relays:
        compare_relays(layers, length, rounds, machine)
        return
    links = link_figures(rounds if options.quick else max(rounds, 5))
    if options.links:
        print_result(
            "engines",
            links["of_memcpy"],
            target=0.5,
            unit="bytes/s of a link between two processes over those of a copy in memory",
            machine=machine,
            **links,
        )
        return
    found, seconds = measure_loops(list(LOOPS), layers, length, rounds, with_relays=False)
    print_table(
        {"engines": 14, "tokens/s": 9, "two is": 9},
        (
            (
                loop,
                f"{found['tokens_per_second'][loop]:.1f}",
                f"{speeds_over(seconds, 'two')[loop]:.3f}x",
            )
            for loop in LOOPS
        ),
    )
    limits = limits_of_this_machine(products=["fp32"])
    print_limits(limits)
    print_result(
        "engines",
        speeds_over(seconds, "two")["one"],
        target=None,
        unit="tokens/s of two engines over one, in other processes, same work, same cores",
        machine=machine | {"limits": limits},
        apart=speeds_over(seconds, "one")["here"],
        two_over_sockets=speeds_over(seconds, "two")["two, sockets"],
        one_over_sockets=speeds_over(seconds, "one")["one, sockets"],
        **links,
        tokens_per_second=found["tokens_per_second"],
        layers=layers,
        length=length,
        rounds=rounds,
    )


def measure_loops(
    loops: list[str], layers: int, length: int, rounds: int, *, with_relays: bool
) -> tuple[dict, dict[str, list[float]]]:
    """Return the figures of loops that took turns, and their seconds; their losses are equal."""
    folder = tempfile.mkdtemp()
    try:
        workers = {
            loop: Worker(Job(loop, layers, length, f"{folder}/{loop}", with_relays), __file__)
            for loop in loops
        }
        seconds = take_turns(workers, rounds)
        found = summarize(workers, seconds, MICRO_BATCHES * length)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if len(set(found["loss"].values())) != 1:
        raise SystemExit(f"the loops should have the same losses to the bit: {found['loss']}")
    return found, seconds


def compare_relays(layers: int, length: int, rounds: int, machine: dict) -> None:
    """Print what relays cost beside two and four engines of this machine."""
    found, seconds = measure_loops(list(RELAY_LOOPS), layers, length, rounds, with_relays=True)
    ratios = {count: speeds_over(seconds, f"{count}, relays")[count] for count in ("two", "four")}
    print_table(
        {"engines": 14, "tokens/s": 9},
        ((loop, f"{found['tokens_per_second'][loop]:.1f}") for loop in RELAY_LOOPS),
    )
    for count, ratio in ratios.items():
        relays = RELAY_LOOPS[f"{count}, relays"][3]
        print(f"{count} engines with {relays} relays are {ratio:.3f} times as fast as without")
    print_result(
        "engines",
        min(ratios.values()),
        target=None,
        unit="tokens/s of engines with relays over the same without, all on this machine",
        machine=machine,
        relays_at_two=ratios["two"],
        relays_at_four=ratios["four"],
        tokens_per_second=found["tokens_per_second"],
        layers=layers,
        length=length,
        rounds=rounds,
    )


def training_loop(job: Job) -> Callable[[], float]:
    """Return a step of a trainer with the loop's engines."""
    from side_by_side.gpt import HEADS, SEED, VOCABULARY

    from penstock.training import Trainer

    engines, start, shared_memory, *relays = (RELAY_LOOPS if job.with_relays else LOOPS)[job.loop]
    text = Path(job.folder) / "text.txt"
    text.parent.mkdir(parents=True)
    text.write_text("\n".join(f"{n} water and {n % 7} weights" for n in range(2_000)))
    trainer = Trainer(
        {
            "model": {
                "preset": "gpt2",
                "n_layer": job.layers,
                "n_embd": WIDTH,
                "n_head": HEADS,
                "vocab_size": VOCABULARY,
                "n_positions": job.length,
            },
            "data": {"input": [str(text)], "sequence_length": job.length},
            "batch": {"size": MICRO_BATCHES, "micro": 1},
            "engines": engines,
            "cluster": {"start": start, "spare": 0, "shared_memory": shared_memory},
            "fabric": {"relays": relays[0] if relays else 0},
            "run": {"dir": str(Path(job.folder) / "run"), "seed": SEED, "steps": 1000},
        }
    )
    return lambda: trainer.run_step().loss


def link_figures(rounds: int) -> dict[str, float]:
    """Print what links carry beside a copy in memory, in turns; return the figures."""
    seconds, of_processor = link_seconds(rounds)
    rates = {name: LINK_BYTES / statistics.median(s) / 1e9 for name, s in seconds.items()}
    ratios = {way: round(median_ratio(seconds["memcpy"], seconds[way]), 3) for way in WAYS}
    chunks = LINK_BYTES // CHUNK_BYTES
    print_table(
        {"chunks of 4 MiB": 16, "GB/s": 6, "of memcpy": 10, "ms sending": 11, "ms taking": 10},
        (
            (
                name,
                f"{rates[name]:.2f}",
                f"{ratios.get(name, 1.0):.3f}",
                *(f"{1000 * s / chunks:.3f}" for s in of_processor[name]),
            )
            for name in seconds
        ),
    )
    return {
        "of_memcpy": ratios["shared"],
        "sockets_of_memcpy": ratios["sockets"],
        "tls_of_memcpy": ratios["tls"],
        "link_gigabytes_per_second": round(rates["shared"], 2),
        "tls_gigabytes_per_second": round(rates["tls"], 2),
        "memcpy_gigabytes_per_second": round(rates["memcpy"], 2),
    }


def link_seconds(rounds: int) -> tuple[dict[str, list[float]], dict[str, tuple[float, float]]]:
    """Return, for each way and a copy in memory, a round's seconds and median processor time.

    Processor time is that of the sending process and of the receiving one.
    """
    source = np.random.default_rng(0).integers(0, 256, LINK_BYTES, np.uint8)
    target = np.zeros(LINK_BYTES, np.uint8)
    senders = {way: _Sender(way) for way in WAYS}
    parts = [slice(at, at + CHUNK_BYTES) for at in range(0, LINK_BYTES, CHUNK_BYTES)]
    seconds: dict[str, list[float]] = {name: [] for name in (*WAYS, "memcpy")}
    sending: dict[str, list[float]] = {name: [] for name in seconds}
    taking: dict[str, list[float]] = {name: [] for name in seconds}
    for number in range(rounds + 1):
        for name in seconds:
            began, began_processor = time.perf_counter(), time.process_time()
            if name in senders:
                taken = senders[name].send(source, parts)
            else:
                taken = 0.0
                for part in parts:
                    target[part] = source[part]
            if number:  # the first makes the buffers
                seconds[name].append(time.perf_counter() - began)
                sending[name].append(time.process_time() - began_processor)
                taking[name].append(taken)
    for sender in senders.values():
        sender.close()
    medians = {n: (statistics.median(sending[n]), statistics.median(taking[n])) for n in seconds}
    return seconds, medians


class _Sender:
    """A link to a process that puts what comes into its place."""

    def __init__(self, way: str) -> None:
        from penstock.distributed.transport import (
            Connection,
            ConnectionListener,
            Credentials,
            Stream,
            new_token,
        )

        credentials = Credentials(new_token())
        listener = socket.create_server(("127.0.0.1", 0))
        came: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        door = ConnectionListener(listener, credentials, came.put)
        door.open()
        command = [sys.executable, __file__, "--receiver", way]
        self._receiver = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert self._receiver.stdin is not None
        with self._receiver.stdin as words:
            words.write(f"{listener.getsockname()[1]} {credentials.token}\n")
        stream = came.get(timeout=60)
        door.close()
        self._answers: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._link = Connection(
            stream,
            lambda link, message: self._answers.put(message.body["processor"]),
            lambda link, error: None,
            lambda: way == "shared",
        )
        self._link.start()

    def send(self, source: np.ndarray, parts: list[slice]) -> float:
        """Send all parts; return the receiver's processor time once they have come."""
        from penstock.distributed.protocol import MessageType, message_with

        for part in parts:
            chunk = part.start // CHUNK_BYTES
            message = message_with(
                source[part], kind=MessageType.WEIGHTS, epoch=0, sender=0, chunk=chunk
            )
            self._link.send(message)
        return self._answers.get(timeout=60)

    def close(self) -> None:
        """End the link, and with it the process."""
        self._link.close()
        self._receiver.wait(timeout=30)


def receive(way: str) -> None:
    """Take chunks over a link, put them in their place, and answer when all have come."""
    from penstock.distributed.protocol import Message, MessageType
    from penstock.distributed.transport import Connection, Credentials, connect, stream as streams

    if way == "tls":  # either end is enough
        streams.is_within_host = lambda connection: False
    port, token = sys.stdin.readline().split()
    stream = connect(socket.create_connection(("127.0.0.1", int(port))), Credentials(token))
    target = np.zeros(LINK_BYTES, np.uint8)
    ended = threading.Event()
    count, began = 0, 0.0

    def take(link: Connection, message: Message) -> None:
        nonlocal count, began
        assert message.payload is not None
        at = message.chunk * CHUNK_BYTES
        target[at : at + message.size] = message.payload
        count += 1
        if count % (LINK_BYTES // CHUNK_BYTES) == 0:
            now = time.process_time()
            link.send(Message(MessageType.WEIGHT_CREDIT, 0, 1, body={"processor": now - began}))
            began = now

    link = Connection(stream, take, lambda link, error: ended.set(), lambda: way == "shared")
    link.start()
    ended.wait()


if __name__ == "__main__":
    main()
