"""Machine code is made once for the same sources, wherever they lie, and again when they change."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.kernels import code_cache
from penstock.kernels.compilation import serial_kernel

PART = """
from penstock.kernels.compilation import inlined

@inlined
def doubled(value):
    return {factor} * value
"""
KERNEL = """
import sys
import numba
import numpy as np
from parts import doubled
from penstock.kernels import compilation

@compilation.DECORATOR
def total(values):
    found = 0.0
    for number in numba.prange(values.size):
        found += doubled(values[number])
    return found

print(total(np.ones(3)), sum(total.stats.cache_hits.values()), "numba.np.linalg" in sys.modules)

@numba.njit
def squares_too(values):
    return total(values) + np.dot(values, values)  # compiled after other code was read

assert squares_too(np.ones(3)) == total(np.ones(3)) + 3
"""


@pytest.fixture(params=["kernel"])
def sources(request, tmp_path):
    """A folder with a kernel and a part that it inlines."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "parts.py").write_text(PART.format(factor=2.0))
    kernel = KERNEL.replace("DECORATOR", request.param)
    (folder / "kernels_of_a_test.py").write_text(kernel)
    return folder


@pytest.fixture
def start(tmp_path):
    """Start a process that runs the kernel of a folder."""

    def start(folder, cache=tmp_path / "cache"):
        path = os.pathsep.join([str(folder), *sys.path])
        own = {
            "PYTHONPATH": path,
            "NUMBA_CACHE_DIR": str(cache),
            # Python takes byte code for that of a source of equal size and second.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-c", "import kernels_of_a_test"],
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            text=True,
        )

    return start


def result_of(process):
    """Return the kernel's result and the number of times that its code was found."""
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    value, hits, imported_all = output.split()
    assert imported_all == str(hits == "0")  # 0.5 s of imports that reading code does not need
    return float(value), int(hits)


@pytest.mark.parametrize("sources", ["kernel", "serial_kernel"], indirect=True)
def test_copies_of_the_same_sources_share_code(sources, start, tmp_path):
    assert result_of(start(sources)) == (6.0, 0)
    copy = tmp_path / "elsewhere" / "sources"
    shutil.copytree(sources, copy)
    os.utime(copy / "kernels_of_a_test.py", (1, 1))
    assert result_of(start(copy)) == (6.0, 1)


@pytest.mark.long
def test_change_of_an_inlined_part_in_another_file_is_compiled(sources, start):
    assert result_of(start(sources)) == (6.0, 0)
    (sources / "parts.py").write_text(PART.format(factor=5.0))
    assert result_of(start(sources)) == (15.0, 0)


@pytest.mark.long
def test_one_of_several_processes_compiles(sources, start, tmp_path):
    results = [result_of(process) for process in [start(sources) for _ in range(3)]]
    assert [value for value, _ in results] == 3 * [6.0]
    assert sorted(hits for _, hits in results) == [0, 1, 1]
    assert len(list((tmp_path / "cache").rglob("*total*.nbc"))) == 1


@pytest.mark.long
def test_kernel_runs_where_no_folder_is_writable(sources, start, tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert result_of(start(sources, cache=file)) == (6.0, 0)


def doubled(values):
    return 2 * values.sum()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder in which this process keeps the code of `doubled`."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    code_cache.writable_folder.cache_clear()
    yield tmp_path
    code_cache.writable_folder.cache_clear()


def is_found():
    """Run `doubled` as another process would, and return whether its code was found."""
    compiled = serial_kernel(doubled)
    assert compiled(np.ones(3)) == 6.0
    return bool(sum(compiled.stats.cache_hits.values()))


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", ["empty", "cut", "flipped bit"])
def test_damaged_code_is_compiled_again(cache, suffix, damage):
    assert [is_found(), is_found()] == [False, True]
    (path,) = cache.rglob(f"*doubled*.{suffix}")
    content = path.read_bytes()
    place = len(content) // 2
    path.write_bytes(
        {
            "empty": b"",
            "cut": content[:place],
            "flipped bit": content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :],
        }[damage]
    )
    assert [is_found(), is_found()] == [False, True]


def test_function_is_called_before_a_compilation_and_not_for_kept_code(cache):
    calls = []
    with code_cache.calling_before_compilation(lambda: calls.append("compiles")):
        assert [is_found(), is_found()] == [False, True]
    assert calls == ["compiles"]


def tripled(values):
    return 3 * values.sum()


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_code_under_the_name_of_another_kernel_is_compiled_again(cache, suffix):
    assert not is_found()
    assert serial_kernel(tripled)(np.ones(3)) == 9.0
    (path,), (other,) = (list(cache.rglob(f"*{name}*.{suffix}")) for name in ("doubled", "tripled"))
    shutil.copyfile(other, path)
    assert [is_found(), is_found()] == [False, True]


def test_code_is_not_taken_for_that_of_other_types_where_files_have_no_locks(tmp_path):
    """Some network file systems have none: two processes may save at once."""
    both = [code_cache._SealedFiles(str(tmp_path), "kernel", "sources") for _ in range(2)]
    first, second = both
    save_data = first._save_data

    def saved_late(name, data):
        second._load_index = dict  # as it was before the first process saved
        second.save("second", "code of second")
        save_data(name, data)

    first._save_data = saved_late
    first.save("first", "code of first")
    del second._load_index
    for files in both:
        found = [files.load(key) for key in ("first", "second")]
        assert found in (["code of first", None], [None, "code of second"])


def test_kernel_runs_on_a_full_disk(cache, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "replace", refuse)
        assert [is_found(), is_found()] == [False, False]
    assert [path.suffix for path in cache.rglob("*doubled*")] == [".lock"]
    assert [is_found(), is_found()] == [False, True]


def test_lock_of_an_ended_process_is_free(tmp_path):
    path = tmp_path / "kernel.lock"
    code = (
        "import sys, pathlib; from penstock.kernels.code_cache import _Lock\n"
        "lock = _Lock(pathlib.Path(sys.argv[1])); lock.acquire(); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        assert not is_free(path)
        holder.kill()
    assert is_free(path)


def test_lock_that_is_never_released_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(code_cache, "_LONGEST_WAIT_SECONDS", 0.1)
    holder, other = (code_cache._Lock(tmp_path / "kernel.lock") for _ in range(2))
    holder.acquire()
    other.acquire()  # returns
    other.release()
    assert not is_free(tmp_path / "kernel.lock")
    holder.release()
    assert is_free(tmp_path / "kernel.lock")


def test_code_of_old_versions_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for number in range(30):
        old = tmp_path / "penstock" / "kernels" / f"old{number}"
        old.mkdir(parents=True)
        os.utime(old, (number, number))
    folder = code_cache.writable_folder(tmp_path, "new")
    assert folder == tmp_path / "penstock" / "kernels" / "new"
    kept = {path.name for path in folder.parent.iterdir()}
    newest = range(30 - code_cache._KEPT_VERSIONS + 1, 30)
    assert kept == {"new", *(f"old{number}" for number in newest)}


def test_old_version_that_another_process_has_removed_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    (tmp_path / "removed").symlink_to("nothing")
    code_cache._remove_oldest(tmp_path, tmp_path / "kept")


def is_free(path):
    """Return whether nobody holds a lock."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
