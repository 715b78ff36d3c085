"""How fast a replica is made: straight from node to node, against through a third process.

Two processes hold a shard's store each, in memory or on flash, of a model that streams bfloat16
(AdamW: 12 bytes per parameter); a third one, as the trainer's, has the second given a copy of the
first. In turns: straight over a link between the two (`penstock.distributed.replication`),
checksums of all of it compared at the end; and read by calls to the one and written by calls to the
other, 16 MiB at a time, the next being read while one is written, as it was done before.

    python benchmarks/replica_copy.py [--quick] [--rounds N] [--mebibytes N] [--sockets]
        [--folder FOLDER]

`value` is the lesser, of memory and flash, of the median ratios of bytes/s within a round.
`--sockets` forbids shared memory, as between hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from contract import describe_machine, limits_of_this_machine, print_limits, print_result

STAGES, STEP = 8, 5
PIECE_BYTES = 16 << 20
BYTES_PER_PARAMETER = 12
TOKEN = "PENSTOCK_TOKEN"


def main() -> None:
    """Run the benchmark, or be one of its nodes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="48 MiB, two rounds")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--mebibytes", type=int, default=None, help="of weights and state")
    parser.add_argument("--sockets", action="store_true", help="no shared memory")
    parser.add_argument("--folder", default=None, help="where the stores on flash are")
    parser.add_argument("--node", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        be_node(**json.loads(options.node))
        return
    size = (options.mebibytes or (48 if options.quick else 1024)) << 20
    rounds = options.rounds or (2 if options.quick else 7)
    disk = options.folder or tempfile.gettempdir()
    machine = describe_machine(disk)
    result = {}
    print(f"{'':10} {'straight':>12} {'through':>12} {'ratio':>8}   MB/s, {size >> 20} MiB")
    for tier in ("memory", "flash"):
        folder = Path(tempfile.mkdtemp(dir=disk)) if tier == "flash" else None
        try:
            result[tier] = measure(size, rounds, folder, not options.sockets)
        finally:
            if folder is not None:
                shutil.rmtree(folder)
        found = result[tier]
        print(
            f"{tier:10} {found['straight'] / 1e6:12.0f} {found['through'] / 1e6:12.0f} "
            f"{found['ratio']:8.2f}"
        )
    limits = limits_of_this_machine(copy=True, folder=disk)
    print_limits(limits)
    print_result(
        "replica_copy",
        round(min(found["ratio"] for found in result.values()), 3),
        target=None,
        unit="bytes/s straight from node to node over those through a third process",
        machine=machine | {"limits": limits},
        mebibytes=size >> 20,
        rounds=rounds,
        shared_memory=not options.sockets,
        **result,
    )


def measure(size: int, rounds: int, folder: Path | None, shares_memory: bool) -> dict:
    """Take turns; return bytes/s of both ways, medians, and of their ratio in a round."""
    from penstock.distributed.protocol import COORDINATOR
    from penstock.distributed.replication import copy_shard
    from penstock.distributed.rpc import RpcClient

    run = endpoint_of(os.environ.setdefault(TOKEN, os.urandom(16).hex()), shares_memory)
    calls = RpcClient(
        lambda node, message: run.call(lambda: run.send(COORDINATOR, node, message)), lambda: None
    )
    run.add(COORDINATOR, SimpleNamespace(progress=0, handle=calls.take))
    run.start()
    nodes = []
    try:
        for number in (1, 2):
            process, address = start_node(number, size, folder, shares_memory, run.address)
            nodes.append((process, address))
            run.call(lambda number=number, address=address: run.add_address(number, address))
        loops: dict[str, Callable[[], int]] = {
            "straight": lambda: copy_shard(calls, 1, nodes[0][1], 2, lambda: None),
            "through": lambda: copy_through(calls, size),
        }
        rates: dict[str, list[float]] = {name: [] for name in loops}
        for number in range(rounds + 1):
            for name in loops if number % 2 else reversed(loops):
                began = time.perf_counter()
                copied = loops[name]()
                rates[name].append(copied / (time.perf_counter() - began))
    finally:
        for process, _ in nodes:
            process.stdin.close()  # it ends with this
            process.wait()
        run.close()
    rates = {name: each[1:] for name, each in rates.items()}  # pages that nobody had touched
    ratios = [a / b for a, b in zip(rates["straight"], rates["through"], strict=True)]
    medians = {name: statistics.median(each) for name, each in rates.items()}
    return {**medians, "ratio": statistics.median(ratios), "ratios": [min(ratios), max(ratios)]}


def copy_through(calls, size: int) -> int:
    """Copy node 1 to node 2 through this process."""
    calls.ask(2, "begin_restore", {}, {})
    copied, writing = 0, None
    for name in weights_of(size):
        roles = calls.ask(1, "roles", {"name": name}, {}).body["roles"]
        for role, (_, (count,)) in roles.items():
            for begin in range(0, count, PIECE_BYTES // 4):
                end = min(begin + PIECE_BYTES // 4, count)
                where = {"name": name, "role": role, "begin": begin}
                values = calls.ask(1, "read", {**where, "end": end}, {}, most=PIECE_BYTES)
                if writing is not None:
                    writing.answer()
                writing = calls.begin(2, "write", where, values.arrays)
                # What crosses is float32; what the store holds of the master is as much.
                copied += 4 * (end - begin)
    writing.answer()
    calls.ask(2, "finish_restore", {"step": STEP}, {})
    return copied


def weights_of(size: int) -> dict[str, int]:
    """Return the weights of the model and their elements."""
    return {f"weight-{n}": size // BYTES_PER_PARAMETER // STAGES // 2048 * 2048 for n in range(8)}


def endpoint_of(token: str, shares_memory: bool):
    """Return an endpoint of this machine."""
    from penstock.distributed.transport import Endpoint

    endpoint = Endpoint(
        token,
        "127.0.0.1",
        on_connection_end=lambda connection, error: None,
        on_new_peer=lambda connection, message: None,
        on_failure=lambda error: os._exit(1),
    )
    endpoint.shares_memory = shares_memory
    return endpoint


def start_node(number: int, size: int, folder: Path | None, shares_memory: bool, run):
    """Start a process with a store; return it and where it listens."""
    told = {"number": number, "size": size, "shares_memory": shares_memory, "run": list(run)}
    told["folder"] = None if folder is None else str(folder / f"node-{number}")
    process = subprocess.Popen(
        [sys.executable, __file__, "--node", json.dumps(told)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    host, port = json.loads(process.stdout.readline())
    return process, (host, port)


def be_node(number: int, size: int, folder: str | None, shares_memory: bool, run: list) -> None:
    """Hold a store, and do what is called for until the standard input ends."""
    import numpy as np

    from penstock.distributed.worker import WorkerShard

    store = store_of(size, folder)
    if number == 1:
        values = np.random.default_rng(0).random(PIECE_BYTES // 4, np.float32) - 0.5
        store.begin_restore()
        for name, count in weights_of(size).items():
            for role in store.roles(name):
                for begin in range(0, count, values.size):
                    store.write(name, role, begin, values[: min(values.size, count - begin)])
        store.finish_restore(STEP)
    endpoint = endpoint_of(os.environ[TOKEN], shares_memory)
    place = SimpleNamespace(store=store, most_bytes=1 << 30)
    endpoint.add_address(0, tuple(run))
    endpoint.add(number, WorkerShard(SimpleNamespace(number=number), endpoint, place))
    endpoint.start()
    print(json.dumps(list(endpoint.address)), flush=True)
    sys.stdin.read()
    endpoint.close()
    store.close()


def store_of(size: int, folder: str | None):
    """Return an empty store, in memory or on flash."""
    import torch

    from penstock.program import WeightSpec
    from penstock.store import (
        AdamW,
        CommitRule,
        DramStore,
        GroupSettings,
        HeldPart,
        PartStage,
        Schedule,
    )
    from penstock.store.flash import FlashStore
    from penstock.weight_formats import SPLIT

    weights = weights_of(size)
    specs = {n: WeightSpec(n, (count,), SPLIT, True) for n, count in weights.items()}
    stages = tuple(PartStage(i, f"stage-{i}", (name,)) for i, name in enumerate(weights))
    part = HeldPart("shard 0", stages, specs)
    settings = dict.fromkeys(weights, GroupSettings(1.0, 0.1, None))
    rule = CommitRule(Schedule("constant", peak=1e-3))
    if folder is None:
        # Gradients are no part of a copy: as small as they can be.
        return DramStore(part, "bf16", AdamW(), settings, rule, torch.bfloat16)
    return FlashStore(
        part,
        Path(folder),
        optimizer=AdamW(),
        groups=settings,
        rule=rule,
        dram_bytes=size,
        gradient_dtype=torch.bfloat16,
    )


if __name__ == "__main__":
    main()
