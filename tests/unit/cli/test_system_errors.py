"""What the operating system refuses where no code expects it: one line, a stable exit code."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import penstock

from penstock.cli.system_errors import explain_system_error
from penstock.errors import BudgetError, ConfigError, StorageError
from penstock.telemetry import process_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        ImportError("libscipy_openblas.so: failed to map segment from shared object"),
    ],
)
def test_lack_of_memory_or_threads_is_a_budget_error(error):
    told = explain_system_error(error)
    assert isinstance(told, BudgetError)
    assert str(told).startswith("the system gives this process no more memory or threads: ")
    assert str(told).endswith(
        "; raise the limit, free memory, or lower `memory` and `engine.threads`"
    )


def test_refused_file_is_named():
    error = OSError(errno.EROFS, "Read-only file system", "runs/mine/config.yaml")
    told = explain_system_error(error)
    assert isinstance(told, StorageError)
    assert str(told) == "runs/mine/config.yaml: Read-only file system"


def test_full_disk_of_the_output_is_named():
    told = explain_system_error(OSError(errno.ENOSPC, "No space left on device"))
    assert str(told) == "standard output: No space left on device"


def test_an_unusable_cache_folder_of_pytorch_is_named(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/nope")
    told = explain_system_error(OSError(errno.ENOENT, "No such file or directory", "/proc/nope"))
    assert isinstance(told, ConfigError)
    assert str(told) == (
        "TORCHINDUCTOR_CACHE_DIR: expected a folder that can be created and written, got "
        "/proc/nope: No such file or directory; choose another folder, or unset the variable"
    )


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), KeyError("x")])
def test_defect_is_not_explained_as_a_system_error(error):
    assert explain_system_error(error) is None


def limited(size):
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def run(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    environment |= options.pop("variables", {})
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, **options)


def test_too_small_address_space_is_refused_before_loading(tmp_path):
    found = run("train", "run.yaml", cwd=tmp_path, preexec_fn=lambda: limited(10**9))
    assert found.returncode == 5
    assert found.stderr == (
        "error: the address space of this process is limited to 1,000,000,000 bytes (ulimit -v); "
        "the libraries and the smallest run need 1,342,177,280; raise that limit, or remove it "
        "and limit the run with `memory`\n"
    )


def test_address_space_limit_reduces_available_memory(monkeypatch):
    monkeypatch.setattr(process_memory, "address_space_limit", lambda: 3 << 30)
    monkeypatch.setattr(process_memory, "address_space_bytes", lambda: 2 << 30)
    assert process_memory.available_bytes() <= 1 << 30


@pytest.mark.long
def test_an_unusable_cache_folder_of_pytorch_stops_a_run_with_one_line(tmp_path):
    (tmp_path / "text.txt").write_text("water over the dam\n" * 100)
    (tmp_path / "run.yaml").write_text("model: {preset: tiny}\ndata: {input: [text.txt]}\n")
    variables = {"TORCHINDUCTOR_CACHE_DIR": "/proc/nope"}
    found = run("train", "run.yaml", cwd=tmp_path, variables=variables)
    assert found.returncode == 2
    assert found.stderr == (
        "error: TORCHINDUCTOR_CACHE_DIR: expected a folder that can be created and written, got "
        "/proc/nope: No such file or directory; choose another folder, or unset the variable\n"
    )


def test_prompt_in_invalid_encoding_is_refused_before_opening_the_run():
    told = penstock("generate", "nowhere", "--prompt", os.fsdecode(b"a\xffb"))
    assert told.returncode == 2
    assert told.stderr == "error: --prompt: expected text in UTF-8, got 'a\\udcffb'\n"
