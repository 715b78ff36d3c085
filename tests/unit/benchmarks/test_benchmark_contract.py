"""What every benchmark ends with, what is said of the machine, and that none is left out."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"
GOOD = {"benchmark": "x", "value": 1.5, "target": None, "unit": "s", "machine": {"processor": "p"}}

XEON = """\
processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 143
model name	: Intel(R) Xeon(R) Processor
stepping	: 8
flags		: fpu avx2 avx512f avx512_bf16 amx_bf16 ht

processor	: 1
model name	: Another
"""
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\n"


@pytest.fixture
def contract(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("contract")


@pytest.fixture
def runner(contract):
    return importlib.import_module("contract.__main__")


def names() -> list[str]:
    return sorted(path.stem for path in BENCHMARKS.glob("*.py"))


def test_continuous_integration_runs_the_quick_form_of_every_benchmark(runner):
    """The list is the folder, so that no script is forgotten; skipped ones say so themselves."""
    assert "make bench QUICK=1" in (ROOT / ".ci" / "run").read_text()
    dry = subprocess.run(
        ["make", "--dry-run", "bench", "QUICK=1"], cwd=ROOT, capture_output=True, text=True
    )
    assert "benchmarks/contract --quick" in dry.stdout, dry.stderr
    assert [path.stem for path in runner.scripts()] == names()
    assert {"gpu", "streaming_tax", "versus_zero_infinity"} < set(names())


def test_deepspeed_loop_needs_no_penstock(tmp_path):
    """It runs under a Python of its own, which need not have Penstock."""
    code = """
import sys
from pathlib import Path

sys.modules["penstock"] = None
from side_by_side.gpt import Gpt
from versus_zero_infinity import ZeroInfinity, work

settings = ZeroInfinity._settings(None, Gpt(2, 1, 64), Path(sys.argv[1]), "fp32")
assert settings["bf16"] == {"enabled": False}
"""
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=BENCHMARKS, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


def test_every_benchmark_is_in_the_documentation_with_its_figure():
    text = (BENCHMARKS / "README.md").read_text()
    assert [name for name in names() if f"| `{name}.py" not in text] == []


@pytest.mark.parametrize("name", names())
def test_every_benchmark_uses_the_shared_result_line_and_has_a_quick_form(name):
    text = (BENCHMARKS / f"{name}.py").read_text()
    assert "print_result(" in text
    assert '"--quick"' in text
    assert "machine=" in text


def test_a_printed_result_passes_the_check(contract, capsys):
    contract.print_result(
        "x", 0.5, target=1.0, unit="share", machine=contract.describe_machine("."), rounds=3
    )
    found = contract.check_result("x", capsys.readouterr().out)
    assert (found["value"], found["target"], found["unit"], found["rounds"]) == (0.5, 1, "share", 3)
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory_gib"] > 0
    assert found["machine"]["disk"]


def test_skipped_benchmark_gives_a_reason(contract):
    skipped = GOOD | {"value": None, "skipped": "no CUDA device"}
    assert contract.check_result("x", json.dumps(skipped))["skipped"] == "no CUDA device"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("", "expected a line of JSON at the end, got ''"),
        ("done in 3 s", "expected a line of JSON at the end, got 'done in 3 s'"),
        ("[1]", "expected a JSON object at the end"),
        (json.dumps({"benchmark": "x", "value": 1}), "has no target, unit, machine"),
        (json.dumps(GOOD | {"benchmark": "y"}), "is of 'y', not of 'x'"),
        (json.dumps(GOOD | {"machine": {}}), "has no processor"),
        (json.dumps(GOOD | {"value": None}), "expected a finite value, or none and why"),
        (json.dumps(GOOD | {"value": math.nan}), "expected a finite value"),
        (json.dumps(GOOD | {"value": True}), "expected a finite value"),
    ],
)
def test_line_that_violates_the_contract_is_refused(contract, line, error):
    with pytest.raises(ValueError, match=error):
        contract.check_result("x", line)


def test_processors_of_equal_name_are_distinguished(contract, tmp_path):
    machine = importlib.import_module("contract.machine")
    (tmp_path / "cpuinfo").write_text(XEON)
    assert machine.processor(tmp_path / "cpuinfo") == (
        "Intel(R) Xeon(R) Processor; family 6; model 143; stepping 8; "
        "avx2; avx512f; avx512_bf16; amx_bf16"
    )
    (tmp_path / "cpuinfo").write_text(ARM)
    assert machine.processor(tmp_path / "cpuinfo")
    assert machine.processor(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("print('a table')\nprint('{line}')", "1.5 s"),
        ("print('{line}')\nraise SystemExit(3)", "FAILED: exit code 3"),
        ("print('a table')", "FAILED: expected a line of JSON at the end, got 'a table"),
        ("", "FAILED: expected a line of JSON at the end, got ''"),
    ],
)
def test_benchmark_outcome_is_reported(runner, tmp_path, text, how):
    (tmp_path / "x.py").write_text(text.replace("{line}", json.dumps(GOOD)))
    assert runner.run(tmp_path / "x.py", is_quick=True).startswith(how)


def test_endless_quick_form_is_stopped_and_reported(runner, monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "QUICK_LIMIT", 0.5)
    (tmp_path / "x.py").write_text("import time\ntime.sleep(600)")
    assert runner.run(tmp_path / "x.py", is_quick=True) == "FAILED: not done in 0.5 s"


def test_failed_benchmark_fails_the_run_and_the_others_still_run(tmp_path, monkeypatch):
    for name, code in (("a", 1), ("b", 0)):
        line = json.dumps(GOOD | {"benchmark": name})
        (tmp_path / f"{name}.py").write_text(f"print('{line}')\nraise SystemExit({code})")
    script = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); sys.argv = ['contract', '--quick']\n"
        "import pathlib, contract.__main__ as runner\n"
        f"runner.FOLDER = pathlib.Path({str(tmp_path)!r})\n"
        "sys.exit(runner.main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    *_, first, second = done.stdout.splitlines()
    assert first.startswith("a ")
    assert "FAILED: exit code 1" in first
    assert second.startswith("b ")
    assert second.endswith("1.5 s")


def test_share_of_dense_products_uses_the_same_round(contract):
    tax = importlib.import_module("streaming_tax")
    job = tax.Job("penstock", "fp32", layers=12, sequences=4, length=512)
    # 0.80 GFLOP: six operations for each of 123 M weights in products, and attention.
    assert tax.flops_per_token(job) == 6 * (12 * 12 * 768**2 + 50257 * 768 + 12 * 2 * 512 * 768)
    assert 0.79e9 < tax.flops_per_token(job) < 0.81e9
    # A machine that is ten times slower in the second round slows both.
    shares = tax.share_of_products(contract.PRODUCT_FLOPS, [2.0, 20.0, 2.0], [1.0, 10.0, 1.0])
    assert shares == 0.5


@pytest.mark.long
def test_limits_are_measured_in_a_process_of_their_own(contract, capsys):
    limits = contract.limits_of_this_machine(products=["fp32"], copy=True)
    assert limits["products_gflop_per_second"]["fp32"] > 0
    assert limits["copy_gb_per_second"] > 0
    contract.print_limits({**limits, "disk_read_gb_per_second": None})
    said = capsys.readouterr().out
    assert said.startswith("the machine's own limits: dense products ")
    assert "a copy in memory" in said
    assert "disk" not in said


@pytest.mark.parametrize("rates", [(1.5, 0.75), (None, None)])
def test_disk_limits_are_measured_rates_or_null_without_direct_io(
    contract, monkeypatch, tmp_path, rates
):
    """Nothing of the disk's loop is left, whether it could be made or not."""
    plain_disk = importlib.import_module("side_by_side.plain_disk")
    limits = importlib.import_module("contract.limits")
    moved = []

    class Disk:
        def __init__(self, path, size, pace):
            if rates[0] is None:
                raise plain_disk.NoDirectIO("none here")
            path.write_bytes(b"some")

        def move(self, read, written):
            moved.append((read, written))

    size = limits._DISK_BYTES
    seconds = iter([size / 1e9 / rate for rate in rates if rate])
    monkeypatch.setattr(plain_disk, "PlainDisk", Disk)
    monkeypatch.setattr(limits, "_median_seconds", lambda step: (step(), next(seconds))[1])
    found = limits._disk_rates(str(tmp_path))
    assert tuple(found.values()) == rates
    assert moved == ([] if rates[0] is None else [(size, 0), (0, size)])
    assert list(tmp_path.iterdir()) == []
