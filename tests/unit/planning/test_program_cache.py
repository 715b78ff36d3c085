"""Compiled programs on disk: when they are used, when not, and what a damaged folder does."""

from __future__ import annotations

import errno
import functools
import os
import random
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from grids import quick_first, thinned
from tiny_models import PERCEPTRON, Perceptron, mean_squared_error
from torch import nn
from transformers import GPT2LMHeadModel
from written_programs import assert_same_program

from penstock.errors import CompileError, ConfigError
from penstock.models import InputSpec, ModelSource
from penstock.planning import builders
from penstock.planning.program_cache import entries, key
from penstock.program import Program

ROWS = {"inputs": {"x": InputSpec((6,))}, "targets": {"y": InputSpec((2,))}}

compile_source = builders.compile_source  # before the tests of a process share programs


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Return the folder of a cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "programs"


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """Return a list that receives the name of each model that is really compiled."""
    names: list[str] = []
    compile_module = builders.compile_module

    def counting(*arguments: Any, **options: Any) -> Program:
        names.append(options["name"])
        return compile_module(*arguments, **options)

    monkeypatch.setattr(builders, "compile_module", counting)
    return names


def program_of(source: ModelSource, **options: Any) -> Program:
    return compile_source(
        source,
        **{"micro_batch": 1, "length": 4, "precision": "fp32", "products": "torch", **options},
    )


def small(**changes: Any) -> ModelSource:
    """Return a source of its own, as each process makes one."""
    fields = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    return ModelSource.from_preset("gpt2", {**fields, **changes})


def test_the_second_compilation_reads_the_program(compiled, folder):
    program = program_of(small())
    again = program_of(small())
    assert compiled == ["gpt2"]
    assert_same_program(again, program)
    assert len(list(folder.iterdir())) == 1


CHANGES: dict[str, Any] = {
    "length": {"length": 5},
    "micro_batch": {"micro_batch": 2},
    "precision": {"precision": "bf16"},
    "frozen": {"freeze": ("transformer.wpe.weight",)},
    "goal": {"goal": "logits"},
    "products": {"products": "onednn"},
    "buffers": {"with_buffers": False},
    "slots": {"slot_bytes": 1200},
    "bfloat16": {
        "freeze": ("transformer.wpe.weight",),
        "bfloat16": ("transformer.wpe.weight",),
    },
    "sparse": {"sparse": {"transformer.h.0.mlp.c_fc.weight": 30}},
}


@pytest.mark.long  # compiles fifteen times
def test_whatever_determines_a_program_is_in_its_key(compiled):
    program_of(small())
    for number, options in enumerate(CHANGES.values(), 2):
        program_of(small(), **options)
        assert len(compiled) == number, options
    for overrides in ({"n_embd": 16}, {"resid_pdrop": 0.3}, {"layer_norm_epsilon": 1e-3}):
        program_of(small(**overrides))
        assert len(compiled) == (number := number + 1), overrides
    adapted = small().with_adapters(rank=2, alpha=4, targets=["*c_fc.weight"])
    program_of(adapted)
    assert len(compiled) == number + 1
    program_of(small().with_adapters(rank=2, alpha=8, targets=["*c_fc.weight"]))
    assert len(compiled) == number + 2
    program_of(small().with_adapters(rank=2, alpha=8, targets=["*c_fc.weight"]))
    assert len(compiled) == number + 2


@pytest.mark.parametrize(
    "changed",
    quick_first(["code", "mode", "attribute", "requires_grad", "settings", "module"], ["mode"]),
)
def test_a_change_outside_of_the_arguments_is_in_the_key(compiled, monkeypatch, changed):
    program_of(small())
    source = small()
    if changed == "code":
        monkeypatch.setattr(key, "code_digest", lambda: "another version")
    elif changed == "mode":
        source.module.model.transformer.drop.eval()
    elif changed == "attribute":
        source.module.model.transformer.drop.p = 0.5
    elif changed == "requires_grad":
        source.module.model.transformer.wpe.weight.requires_grad_(False)
    elif changed == "module":
        source.module.model.transformer.h[0].mlp.act = nn.ReLU()
    else:
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    program_of(source)
    assert len(compiled) == 2


class Doubled(nn.Module):
    """Code of a user's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def _with_own_module(source: ModelSource, patch: pytest.MonkeyPatch) -> None:
    source.module.model.transformer.h[0].mlp.act = Doubled()


def _with_own_method(source: ModelSource, patch: pytest.MonkeyPatch) -> None:
    module = source.module.model.transformer.h[0].mlp.act
    module.forward = lambda x: 2 * x


def _with_own_class_method(source: ModelSource, patch: pytest.MonkeyPatch) -> None:
    owner = type(source.module.model.transformer.h[0].mlp)
    forward = owner.forward
    patch.setattr(owner, "forward", lambda self, x: forward(self, 2 * x))


def _with_own_function(source: ModelSource, patch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt2 import modeling_gpt2

    attend = modeling_gpt2.eager_attention_forward
    patch.setattr(modeling_gpt2, "eager_attention_forward", lambda *a, **o: attend(*a, **o))


def _with_wrapped_class_method(source: ModelSource, patch: pytest.MonkeyPatch) -> None:
    owner = type(source.module.model.transformer.h[0].mlp)
    inner = owner.forward

    @functools.wraps(inner)
    def forward(self: Any, x: torch.Tensor) -> Any:
        return inner(self, 2 * x)

    patch.setattr(owner, "forward", forward)


def _with_wrapped_function(source: ModelSource, patch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt2 import modeling_gpt2

    attend = modeling_gpt2.eager_attention_forward
    wrapped = functools.wraps(attend)(lambda *a, **o: attend(*a, **o))
    patch.setattr(modeling_gpt2, "eager_attention_forward", wrapped)


def _with_own_attention(source: ModelSource, patch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", lambda *a, **o: attend(*a, **o))


def _with_own_masks(source: ModelSource, patch: pytest.MonkeyPatch) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    patch.setitem(
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *a, **o: mask(*a, **o)
    )


def _with_hook(source: ModelSource, patch: pytest.MonkeyPatch) -> None:
    source.module.model.transformer.h[0].register_forward_hook(lambda m, i, o: None)


@pytest.mark.parametrize(
    "change",
    quick_first(
        [
            _with_own_module,
            _with_own_method,
            _with_own_class_method,
            _with_own_function,
            _with_wrapped_class_method,
            _with_wrapped_function,
            _with_own_attention,
            _with_own_masks,
            _with_hook,
        ],
        [_with_own_method, _with_wrapped_class_method, _with_own_attention, _with_hook],
    ),
)
def test_a_users_own_code_in_a_library_model_is_compiled_anew(
    compiled, folder, monkeypatch, change
):
    program_of(small())
    for number in (2, 3):
        source = small()
        with monkeypatch.context() as patch:
            change(source, patch)
            program_of(source)
        assert len(compiled) == number
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("how", quick_first(["module", "library module", "factory"], ["module"]))
def test_a_model_of_a_user_is_compiled_anew(compiled, folder, how):
    for _ in range(2):
        if how == "module":
            program_of(ModelSource.from_module(Perceptron(), loss=mean_squared_error, **ROWS))
        elif how == "library module":
            program_of(ModelSource.from_module(GPT2LMHeadModel(small().hf_config)))
        else:
            program_of(PERCEPTRON.source(0))
    assert len(compiled) == 2
    assert not folder.exists()


def test_errors_are_raised_by_every_compilation(compiled):
    for _ in range(2):
        with pytest.raises(ConfigError, match="freeze"):
            program_of(small(), freeze=("no such weight",))
    assert len(compiled) == 2


def test_hooks_on_gradients_are_refused_although_the_program_is_kept():
    program_of(small())
    source = small()
    source.module.model.transformer.wpe.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CompileError, match="hook"):
        program_of(source)


@pytest.mark.parametrize("says", ["warning", "log"])
def test_a_compilation_that_says_something_says_it_every_time(
    compiled, folder, monkeypatch, says, caplog
):
    import logging

    compile_module = builders.compile_module

    def saying(*arguments: Any, **options: Any) -> Program:
        if says == "warning":
            warnings.warn("for the user", UserWarning, stacklevel=2)
        else:
            logging.getLogger("transformers.models").warning("for the user")
        return compile_module(*arguments, **options)

    monkeypatch.setattr(builders, "compile_module", saying)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        program_of(small())
        program_of(small())
    assert len(compiled) == 2
    assert not folder.exists()
    if says == "warning":
        assert [str(one.message) for one in shown] == ["for the user"] * 2


@pytest.mark.long
def test_a_known_program_is_returned_from_the_cache_too(compiled):
    known = program_of(small())
    same_graph = {"slot_bytes": 1 << 30, "known": known}
    assert program_of(small(), **same_graph) is known  # compiled: the graph is the same
    assert len(compiled) == 2
    again = program_of(small())
    assert program_of(small(), **{**same_graph, "known": again}) is again
    assert len(compiled) == 2
    other = program_of(small(n_embd=16))
    fresh = program_of(small(), slot_bytes=1 << 30, known=other)
    assert fresh is not other
    assert fresh.graph_digest == known.graph_digest
    assert len(compiled) == 4  # the entry names a graph, and nobody had its program
    program_of(small(), slot_bytes=1 << 30)
    assert len(compiled) == 4


def entry_of(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_an_entry_with_a_flipped_bit_is_compiled_again(compiled, folder):
    program = program_of(small())
    path = entry_of(folder)
    data = path.read_bytes()
    draw = random.Random(1)
    places = [0, 20, 60, len(data) - 1, *(draw.randrange(len(data)) for _ in range(200))]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(damaged))
        assert entries.read_entry(path.name) is None, place
        assert not path.exists()
    path.write_bytes(bytes(damaged))
    assert_same_program(program_of(small()), program)
    assert len(compiled) == 2
    assert path.read_bytes() == data


@pytest.mark.parametrize("length", quick_first([0, 10, 51, 52, 500, -1], [0, 500]))
def test_a_truncated_entry_is_compiled_again(compiled, folder, length):
    program_of(small())
    path = entry_of(folder)
    data = path.read_bytes()
    path.write_bytes(data[:length])
    program_of(small())
    assert len(compiled) == 2
    assert path.read_bytes() == data


def test_an_entry_on_a_read_only_disk_is_read(compiled, folder, monkeypatch):
    def refuse(path):
        raise OSError(errno.EROFS, "Read-only file system")

    program_of(small())
    monkeypatch.setattr(entries.os, "utime", refuse)
    program_of(small())
    assert len(compiled) == 1


@pytest.mark.parametrize(
    "content", quick_first([b"", b"p", b"q", b"p" + bytes(8), b"d", b"p{}"], [b"", b"p{}"])
)
def test_a_forged_entry_with_a_true_checksum_is_compiled_again(compiled, folder, content):
    program_of(small())
    path = entry_of(folder)
    data = path.read_bytes()
    entries.write_entry(path.name, content)
    program_of(small())
    assert len(compiled) == 2
    assert path.read_bytes() == data


@pytest.mark.long
def test_an_entry_of_another_name_is_compiled_again(compiled, folder):
    program_of(small())
    path = entry_of(folder)
    program_of(small(), length=5)
    (other,) = set(folder.iterdir()) - {path}
    other.write_bytes(path.read_bytes())
    program_of(small(), length=5)
    assert len(compiled) == 3


@pytest.mark.parametrize(
    "what",
    quick_first(["folder", "fifo", "link to nothing", "file of another user"], ["folder"]),
)
def test_something_else_in_the_place_of_an_entry_is_no_error(compiled, folder, what, monkeypatch):
    program_of(small())
    path = entry_of(folder)
    if what == "file of another user":
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    else:
        path.unlink()
        if what == "folder":
            path.mkdir()
        elif what == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(folder / "nothing")
    program_of(small())
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("call", "error"),
    thinned(
        ["mkdir", "open", "replace", "scandir"],
        [PermissionError, OSError],
        others=pytest.mark.long,
    ),
)
def test_a_folder_that_takes_no_files_is_no_error(compiled, folder, monkeypatch, error, call):
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise error(28, "No space left on device")

    owner = {"mkdir": Path, "open": entries, "replace": os, "scandir": os}[call]
    monkeypatch.setattr(owner, call, refuse, raising=False)
    program_of(small())
    monkeypatch.undo()
    left = list(folder.iterdir()) if folder.exists() else []
    assert not [path for path in left if path.name.startswith(".")]


def test_a_cache_folder_that_is_a_file_is_no_error(compiled, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    program_of(small())
    program_of(small())
    assert len(compiled) == 2


def test_the_least_recently_used_entries_are_removed(folder, monkeypatch):
    monkeypatch.setattr(entries, "MOST_BYTES", 5000)
    for number in range(4):
        entries.write_entry(f"{number}", bytes(1000))
        os.utime(folder / f"{number}", (number, number))
    assert entries.read_entry("0") is not None  # used now
    entries.write_entry("4", bytes(1000))
    entries.write_entry("5", bytes(1000))
    assert {path.name for path in folder.iterdir()} == {"0", "3", "4", "5"}


def test_temporary_files_of_killed_processes_are_removed(folder):
    entries.write_entry("one", bytes(10))
    for name, age in (("old", 7200), ("new", 10)):
        path = folder / f".tmp-{name}"
        path.write_bytes(b"")
        then = path.stat().st_mtime - age
        os.utime(path, (then, then))
    entries.write_entry("two", bytes(10))
    assert {path.name for path in folder.iterdir()} == {"one", "two", ".tmp-new"}


def test_writers_at_the_same_time_leave_whole_entries(folder):
    contents = [bytes([number]) * (50_000 + number) for number in range(8)]
    failed = []

    def work(content: bytes) -> None:
        for _ in range(30):
            entries.write_entry("one", content)
            found = entries.read_entry("one")
            if found is None or bytes(found) not in contents:
                failed.append(found)

    threads = [threading.Thread(target=work, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert [path.name for path in folder.iterdir()] == ["one"]
