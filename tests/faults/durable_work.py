"""Pieces of work that make something durable: what each promises, and a check that it is kept.

A scenario is made once, in a folder of its own for what it compares with. `fresh` gives the disk
on which its work begins; `work` does it, or goes on with what another process has left, and says
what it has made durable as soon as it has; `check` looks at what a crash has left.
"""

import contextlib
import errno
import functools
import shutil
from contextlib import closing
from pathlib import Path
from unittest import mock

import torch
from sharded_stores import sharded_flash
from sparse_training import train_sparse
from store_programs import flash_store, make_program, random_weights, train, training_store

from penstock.config import Config, load, write_record
from penstock.data import build_dataset
from penstock.errors import StorageError
from penstock.models import keep_small_files, verify_kept
from penstock.models.adapter import Adapter
from penstock.models.kept_folder import CHECKSUMS
from penstock.sparsity import ChangeTimes, DropFraction, SparseEvolutionaryTraining
from penstock.store import (
    MaskRule,
    checkpoint_hash,
    export_adapters,
    export_huggingface,
    export_packed,
    find_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from penstock.store.checkpoint import save
from penstock.store.flash import discard_untrained, forget, journal
from penstock.store.flash.shards import Shards, read_shards
from penstock.telemetry.metrics_writer import drop_after, read_metrics

LAYERS = ({"embed": (9, 6), "frozen": (9,)}, {"block": (7, 7)})
PROGRAM = make_program(LAYERS, ("frozen",))
SPARSE_PROGRAM = make_program(LAYERS, ("frozen",), sparse={"block": 25})
MASKS = MaskRule(
    SparseEvolutionaryTraining(ChangeTimes(1, 4, 1), DropFraction(0.3, 6)),
    1,
    "random",
    {"block": 0.5},
)
STEPS = 4


@functools.cache
def hashes(seed=1, is_sparse=False):
    """Return the hash of the weights after 0, 1, 2 ... steps that nothing interrupted."""
    program, step = (SPARSE_PROGRAM, train_masked) if is_sparse else (PROGRAM, train)
    store = training_store(program, masks=MASKS if is_sparse else None)
    store.load(random_weights(program, seed).items())
    found = [store.content_hash()]
    for _ in range(STEPS):
        step(store, 1, seed)
        found.append(store.content_hash())
    return found


def train_masked(store, steps, seed):
    """Train sparse weights, on the same gradients whatever the seed."""
    train_sparse(store, steps)


class Scenario:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fresh(self, root: Path) -> Path:
        """Return the disk as the work finds it."""
        (root / "there").mkdir(parents=True)
        return root


class Flash(Scenario):
    """A store that is made below folders that are new, loaded and trained."""

    rotate_bytes = journal.ROTATE_BYTES
    train = staticmethod(train)
    hashes = staticmethod(hashes)

    @staticmethod
    def opened(folder):
        return flash_store(PROGRAM, folder)

    def work(self, root, promise):
        usual, journal.ROTATE_BYTES = journal.ROTATE_BYTES, self.rotate_bytes
        try:
            with closing(self.opened(root / "there" / "new" / "flash")) as store:
                if store.is_new:
                    store.load(random_weights(store.program, 1).items())
                promise(store.durable_step)
                while store.step < STEPS:
                    self.train(store, 1, 1)
                    store.make_durable()
                    promise(store.durable_step)
        finally:
            journal.ROTATE_BYTES = usual

    def check(self, root, promised):
        with closing(self.opened(root / "there" / "new" / "flash")) as store:
            assert store.is_new or store.content_hash() == self.hashes()[store.step]
            assert not promised or (store.durable_step or 0) >= max(promised)
            assert not promised or not store.is_new


class RotatingFlash(Flash):
    """The same with a journal that is begun anew every few steps."""

    rotate_bytes = 1


class SparseFlash(Flash):
    """The same with a sparse weight, whose mask changes at every step."""

    train = staticmethod(train_masked)
    hashes = staticmethod(functools.partial(hashes, is_sparse=True))

    @staticmethod
    def opened(folder):
        return flash_store(SPARSE_PROGRAM, folder, masks=MASKS)


class ShardedFlash(Flash):
    """The same in two shards, which agree on the step that both hold."""

    @staticmethod
    def opened(folder):
        return sharded_flash(PROGRAM, folder, 2)


class ShardsFile(Scenario):
    """What says that a folder is one of shards, before there is any."""

    def work(self, root, promise):
        Shards.new(root / "there", 2, {"a": (8, 2)}).write()
        promise(2)

    def check(self, root, promised):
        found = read_shards(root / "there")
        assert found is not None or not promised
        assert found is None or found.count == 2


class DiscardedFlash(Scenario):
    """Weights that were never trained make way for others."""

    opened = staticmethod(Flash.opened)

    def __init__(self, folder):
        super().__init__(folder)
        with closing(self.opened(folder / "flash")) as store:
            store.load(random_weights(PROGRAM, 2).items())

    def fresh(self, root):
        shutil.copytree(self.folder, root)
        return root

    def work(self, root, promise):
        with closing(self.opened(root / "flash")) as store:
            is_old = not store.is_new and store.content_hash() == hashes(2)[0]
        if is_old:
            discard_untrained(root / "flash")
            promise(None)
        with closing(self.opened(root / "flash")) as store:
            if store.is_new:
                store.load(random_weights(PROGRAM, 1).items())
            promise(hashes(1)[0])

    def check(self, root, promised):
        with closing(self.opened(root / "flash")) as store:
            found = None if store.is_new else store.content_hash()
        assert found in (promised[-1:] or [hashes(2)[0]]) + [None, hashes(1)[0]]
        assert found is not None or hashes(1)[0] not in promised


class ForgottenFlash(DiscardedFlash):
    """What a replica held that is to be given a copy: without it, or as it was."""

    def work(self, root, promise):
        forget(root / "flash")
        promise(None)

    def check(self, root, promised):
        with closing(self.opened(root / "flash")) as store:
            assert (
                store.is_new if promised else store.is_new or store.content_hash() == hashes(2)[0]
            )


class DiscardedShards(DiscardedFlash):
    """The same in two shards."""

    opened = staticmethod(ShardedFlash.opened)


class Checkpoints(Scenario):
    """A run that saves after every step, and lets the one before go."""

    @functools.cached_property
    def stores(self):
        made = []
        for steps in range(1, STEPS):
            store = training_store(PROGRAM)
            store.load(random_weights(PROGRAM, 1).items())
            train(store, steps, 1)
            made.append(store)
        return made

    def work(self, root, promise):
        folder = root / "there" / "run" / "checkpoints"
        found = find_checkpoint(folder, "latest")
        done = verify_checkpoint(found).step if found else 0
        for store in self.stores[done:]:
            save_checkpoint(store, folder, {"note": "mine"}, keep_last=1)
            promise(store.step)

    def check(self, root, promised):
        folder = root / "there" / "run" / "checkpoints"
        found = find_checkpoint(folder, "latest")
        assert (0 if found is None else verify_checkpoint(found).step) >= max(promised, default=0)
        for path in folder.glob("step-*"):  # under its own name a folder is whole, listed or not
            state = verify_checkpoint(path)
            assert checkpoint_hash(path) == hashes()[state.step]


class LeftCheckpoint(Checkpoints):
    """The same where one process was killed before the index named its checkpoint, one within."""

    def __init__(self, folder):
        super().__init__(folder)
        checkpoints = folder / "there" / "run" / "checkpoints"
        save_checkpoint(self.stores[0], checkpoints, {"note": "mine"})
        listed = (checkpoints / "index.json").read_bytes()
        save_checkpoint(self.stores[1], checkpoints, {"note": "mine"})
        (checkpoints / "index.json").write_bytes(listed)
        (checkpoints / ".tmp-step-00000003").mkdir()

    def fresh(self, root):
        shutil.copytree(self.folder, root)
        return root


class RefusedCheckpoint(Checkpoints):
    """The same where the disk refuses each index once, and has it at the second trial."""

    def work(self, root, promise):
        folder = root / "there" / "run" / "checkpoints"
        for store in self.stores:
            found = find_checkpoint(folder, "latest")
            if found and verify_checkpoint(found).step >= store.step:
                continue
            full = OSError(errno.ENOSPC, "full")
            refused = mock.patch.object(save, "write_index", side_effect=full)
            with refused, contextlib.suppress(StorageError):
                save_checkpoint(store, folder, {"note": "mine"}, keep_last=1)
            save_checkpoint(store, folder, {"note": "mine"}, keep_last=1)
            promise(store.step)


class Appearing(Scenario):
    """Work whose result is a folder that appears whole, and is there when it returns."""

    def __init__(self, folder):
        super().__init__(folder)
        self.make(folder / "result")

    def work(self, root, promise):
        if not (root / "there" / "new" / "result").exists():
            self.make(root / "there" / "new" / "result")
            promise("it is there")

    def check(self, root, promised):
        result = root / "there" / "new" / "result"
        assert result.exists() or not promised
        if result.exists():
            assert tree(result) == tree(self.folder / "result")


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@functools.cache
def small_store():
    store = training_store(make_program([{"a": (8, 2), "b": (2, 8)}]))
    store.load((name, torch.ones(shape)) for name, shape in (("a", (8, 2)), ("b", (2, 8))))
    return store


class HuggingFaceFolder(Appearing):
    def make(self, folder):
        other = self.folder / "tokenizer.json"
        other.write_text("{}")
        export_huggingface(small_store(), folder, config={"a": 1}, files=[other])


class PackedFolder(Appearing):
    """An export of a store one of whose weights is sparse."""

    @functools.cached_property
    def store(self):
        store = training_store(SPARSE_PROGRAM, masks=MASKS)
        store.load(random_weights(SPARSE_PROGRAM, 1).items())
        return store

    def make(self, folder):
        other = self.folder / "tokenizer.json"
        other.write_text("{}")
        export_packed(self.store, folder, config={"a": 1}, files=[other])


class AdapterFolder(Appearing):
    def make(self, folder):
        adapter = Adapter(down="b", up="a", rank=2, alpha=2.0, dropout=0.0, transposed=False)
        export_adapters(small_store(), folder, {"w": adapter}, task="causal_lm")


class DataSet(Appearing):
    tokenizer, texts = "train-bpe:258", ["some text. ", "more text. ", "and the last. "]

    def make(self, folder):
        path = self.folder / "input"
        path.mkdir(exist_ok=True)
        for number, text in enumerate(self.texts):
            (path / f"{number}.txt").write_text(text * 20)
        build_dataset([path], self.tokenizer, folder, validation=0.4, chunk_bytes=256)


class DataSetOfOneDocument(DataSet):
    """Its end is held out, so that the file of what trains is cut."""

    tokenizer, texts = "bytes", ["only one. "]


class RunFolder(Scenario):
    """What lies in a run's folder beside its state."""

    def __init__(self, folder):
        super().__init__(folder)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text('{"model_type": "gpt2"}')
        (folder / "model" / "tokenizer.json").write_text("{}" * 1000)

    def config(self, root, steps):
        return Config.from_mapping(
            {"model": "gpt2", "run": {"dir": str(root / "there" / "new" / "run"), "steps": steps}}
        )

    def work(self, root, promise):
        run = root / "there" / "new" / "run"
        promise(("begun", 0))
        for steps in (1, 2):
            write_record(self.config(root, steps))
            promise(("steps", steps))
        if not (run / "model").exists():
            keep_small_files(self.folder / "model", run / "model")
            promise(("kept", 1))

    def check(self, root, promised):
        run = root / "there" / "new" / "run"
        config = run / "config.yaml"
        assert config.exists() or not any(what == "steps" for what, _ in promised)
        if config.exists():  # a process that goes on has written over what the one before promised
            begun = max(at for at, (what, _) in enumerate(promised) if what == "begun")
            least = 2 if ("steps", 2) in promised[begun:] else 1
            assert load(config).run.steps in (least, 2)
        kept = run / "model"
        assert kept.exists() or ("kept", 1) not in promised
        if kept.exists():
            assert verify_kept(kept) == 2
            copied = {name: content for name, content in tree(kept).items() if name != CHECKSUMS}
            assert copied == tree(self.folder / "model")


class Figures(Scenario):
    """The figures of steps that are done again are dropped: all lines are there, or those kept."""

    ROWS = tuple({"event": "step", "step": step, "loss": 1.5 / step} for step in range(1, 20))

    def fresh(self, root):
        root.mkdir()
        lines = "".join(f'{{"event": "step", "step": {r["step"]}, "loss": {r["loss"]}}}\n'
                        for r in self.ROWS)  # fmt: skip
        (root / "metrics.jsonl").write_text(lines)
        return root

    def work(self, root, promise):
        drop_after(root / "metrics.jsonl", 10)

    def check(self, root, promised):
        assert tuple(read_metrics(root / "metrics.jsonl")) in (self.ROWS, self.ROWS[:10])


SCENARIOS = {
    kind.__name__: kind
    for kind in (
        Flash,
        RotatingFlash,
        SparseFlash,
        ShardedFlash,
        ShardsFile,
        DiscardedFlash,
        DiscardedShards,
        ForgottenFlash,
        Checkpoints,
        LeftCheckpoint,
        RefusedCheckpoint,
        HuggingFaceFolder,
        PackedFolder,
        AdapterFolder,
        DataSet,
        DataSetOfOneDocument,
        RunFolder,
        Figures,
    )
}
