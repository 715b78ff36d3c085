"""`penstock data` as people run it: real files, and processes where these are the question."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import warm_start
from command_line import penstock

from penstock.data import LanguageModelSource, TokenDataset, build_dataset
from penstock.progress.figures import show_bytes

PENSTOCK = [sys.executable, "-c", "from penstock.cli import main; main()", "data"]


def data(*arguments, cwd=None):
    return penstock("data", *arguments, cwd=cwd)


def in_a_process(*args, **options):
    return warm_start.run(
        [*PENSTOCK, *map(str, args)], capture_output=True, text=True, timeout=240, **options
    )


@pytest.fixture
def texts(tmp_path):
    rng = random.Random(3)
    for name in ("a.txt", "b.txt", "c d.txt"):
        words = rng.choices(["water", "weights", "stream", "\n", "東京"], k=500)
        (tmp_path / name).write_text(" ".join(words), encoding="utf-8")
    return tmp_path


def contents(path, split="train"):
    dataset = TokenDataset.open(path, verify=True)
    return dataset.tokenizer().decode(dataset.read(split, 0, dataset.tokens(split)))


@pytest.mark.parametrize(
    "flags",
    [
        ["--input", "a.txt", "b.txt", "c d.txt"],
        ["--input", "a.txt", "--input", "b.txt", "c d.txt"],
        ["-i", "a.txt", "b.txt", "-i", "c d.txt"],
        ["--input=a.txt", "b.txt", "c d.txt"],
        ["--input=a.txt", "--input=b.txt", "--input=c d.txt"],
        ["--quiet", "--input", "a.txt", "b.txt", "c d.txt", "--overwrite"],
        ["--input", "[ab].txt", "c d.txt"],
        ["--input", ".", "--glob", "*.txt"],
    ],
    ids=" ".join,
)
def test_one_input_flag_takes_several_files(texts, tmp_path_factory, flags):
    out = tmp_path_factory.mktemp("out") / "set"
    done = data(
        "build", *flags, "--tokenizer", "bytes", "--validation", "0", "--out", out, cwd=texts
    )
    assert done.returncode == 0, done.stderr
    files = [texts / name for name in ("a.txt", "b.txt", "c d.txt")]
    assert contents(out) == "".join(file.read_text() + "<|endoftext|>" for file in files)


def test_build_and_inspect_print_plain_lines_in_a_log(texts):
    done = in_a_process(
        "build", "--input", "a.txt", "b.txt", "c d.txt", "--tokenizer", "train-bpe:300",
        "--out", "set", "--validation", "0.5", "--seed", "4", cwd=texts,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    size = sum((texts / name).stat().st_size for name in ("a.txt", "b.txt", "c d.txt"))
    assert done.stderr.splitlines() == [
        f"training the tokenizer {show_bytes(size)}",
        f"tokenising {show_bytes(size)}",
    ]
    dataset = TokenDataset.open(texts / "set")
    assert f"{dataset.tokens('train'):,} tokens" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    looked = in_a_process("inspect", "set", cwd=texts)
    assert looked.returncode == 0, looked.stderr
    table = done.stdout[done.stdout.index("data set ") :]
    assert looked.stdout.startswith(table)
    assert looked.stdout.splitlines()[-1].startswith("all checksums match: ")
    assert dataset.fingerprint in looked.stdout


def test_quiet_prints_nothing(texts):
    for args in (
        ("build", "--input", "a.txt", "--tokenizer", "bytes", "--out", "set", "--quiet"),
        ("inspect", "set", "--quiet"),
    ):
        done = data(*args, cwd=texts)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_terminal_gets_a_progress_bar(texts):
    import pty

    parent, child = pty.openpty()
    command = [*PENSTOCK, "build", "--input", "a.txt", "--tokenizer", "bytes", "--out", "set"]
    with subprocess.Popen(
        command, cwd=texts, stdout=subprocess.PIPE, stderr=child, env=os.environ | {"TERM": "xterm"}
    ) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                block = os.read(parent, 65536)
            except OSError:  # how Linux says that the other side is closed
                break
            if not block:
                break
            shown += block
        process.communicate()
    os.close(parent)
    assert process.returncode == 0
    assert b"tokenising" in shown
    assert "━".encode() in shown


def test_user_errors_print_one_line_and_an_exit_code(texts):
    build = ("build", "--tokenizer", "bytes", "--out", "set", "--input")
    done = data(*build, "a.txt", "c.txt", cwd=texts)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "error: input c.txt does not exist (did you mean 'c d.txt'?)\n"
    (texts / "bad.jsonl").write_text('{"text": "x"}\n{"text": \n')
    done = data(*build, "a.txt", "bad.jsonl", cwd=texts)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == (
        "error: bad.jsonl:2: broken JSON at column 9: Expecting value"
    )
    done = data(*build, "a.txt", "--validation", "2", cwd=texts)
    assert done.returncode == 2
    assert sorted(os.listdir(texts)) == ["a.txt", "b.txt", "bad.jsonl", "c d.txt"]


def test_a_corrupt_shard_is_reported_by_inspect(texts):
    data("build", "--input", "a.txt", "--tokenizer", "bytes", "--out", "set", cwd=texts)
    shard = texts / "set" / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 4
    shard.write_bytes(content)
    done = data("inspect", "set", cwd=texts)
    assert done.returncode == 6
    assert "error: set/train-00000.bin is corrupt between byte 0 and " in done.stderr


def test_limit_of_a_files_size_is_reported_as_one(texts):
    # The kernel itself refuses to let the process's files grow beyond the limit.
    (texts / "big.txt").write_bytes(b"word " * 400_000)
    done = in_a_process(
        "build", "--input", "big.txt", "--tokenizer", "bytes", "--out", "set",
        cwd=texts, limits={resource.RLIMIT_FSIZE: 2**20},
    )  # fmt: skip
    assert done.returncode == 7
    assert done.stderr.splitlines()[-1] == (
        f"error: cannot write {os.path.realpath(texts)}/set: File too large; nothing was left "
        "behind; raise the limit of 1,048,576 bytes for a file of this process (ulimit -f)"
    )
    assert sorted(os.listdir(texts)) == ["a.txt", "b.txt", "big.txt", "c d.txt"]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A file that takes a second to read."""
    rng = random.Random(1)
    path = tmp_path_factory.mktemp("large") / "big.jsonl"
    with path.open("w") as file:
        for _ in range(40_000):
            file.write(json.dumps({"text": " ".join(rng.choices("abcdefgh", k=60))}) + "\n")
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "delay", "overwrite"),
    [
        (signal.SIGKILL, 0.3, True),
        pytest.param(signal.SIGINT, 0.0, True, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, 0.0, False, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, 0.3, False, marks=pytest.mark.long),
    ],
)
def test_interrupted_build_leaves_no_partial_data_set(tmp_path, large, how, delay, overwrite):
    out = tmp_path / "set"
    command = ["build", "--input", str(large), "--out", str(out), "--tokenizer"]
    if overwrite:
        (tmp_path / "old.txt").write_text("the old one")
        build_dataset([tmp_path / "old.txt"], "bytes", out)
        command.insert(1, "--overwrite")
    old = TokenDataset.open(out).fingerprint if overwrite else None
    aside = tmp_path / ".set.building"
    with subprocess.Popen(
        [*PENSTOCK, *command, "train-bpe:300"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + 60
        while not list(aside.glob("*")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(delay)
        process.send_signal(how)
        process.communicate()
    left = {name for name in os.listdir(tmp_path) if name != "old.txt"}
    if process.returncode != 0:  # stopped in time
        assert "set" in left if overwrite else "set" not in left
        assert left <= {"set", ".set.building"}
        if how == signal.SIGINT:
            assert ".set.building" not in left
        if overwrite:
            assert TokenDataset.open(out, verify=True).fingerprint == old
    done = data(*command, "bytes", *(() if overwrite or "set" not in left else ["--overwrite"]))
    assert done.returncode == 0, done.stderr
    TokenDataset.open(out, verify=True)
    assert not aside.exists()


def test_all_processes_draw_the_same_samples(texts):
    data(
        "build", "--input", "a.txt", "b.txt", "c d.txt", "--tokenizer", "bytes", "--out", "set",
        cwd=texts,
    )  # fmt: skip
    code = (
        "import sys, numpy as np\n"
        "from penstock.data import *\n"
        "source = LanguageModelSource(TokenDataset.open(sys.argv[1]), 'train', 32, 5)\n"
        "np.savez(sys.argv[2], **source.batch(1234, [int(i) for i in sys.argv[3:]], 8))"
    )
    rows = []
    for half in (["0", "1", "2", "3"], ["4", "5", "6", "7"]):
        file = texts / f"{half[0]}.npz"
        command = [sys.executable, "-c", code, str(texts / "set"), str(file), *half]
        warm_start.run(command, check=True)
        with np.load(file) as arrays:
            rows.append(dict(arrays))
    whole = LanguageModelSource(TokenDataset.open(texts / "set"), "train", 32, 5).batch(
        1234, range(8), 8
    )
    for name, array in whole.items():
        assert np.array_equal(np.concatenate([part[name] for part in rows]), array)


def test_pytorch_reads_the_batches(texts):
    torch = pytest.importorskip("torch")
    data("build", "--input", "a.txt", "--tokenizer", "bytes", "--out", "set", cwd=texts)
    batch = LanguageModelSource(TokenDataset.open(texts / "set"), "train", 32).batch(0, [0, 1], 2)
    logits = torch.zeros(2, 32, 257)
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(batch["labels"]).flatten()
    )
    assert float(loss) == pytest.approx(np.log(257))


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "import penstock.cli.data\n"
        "print([m for m in ('torch', 'transformers', 'numba', 'numpy', 'tokenizers', 'pyarrow') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
