"""What other programs take of the cores, as the system counts it."""

import os
import sys
import time

import pytest

from penstock.telemetry.core_use import CoreUse

SECOND = os.sysconf("SC_CLK_TCK")


def written(path, *seconds):
    path.write_text(f"cpu  {' '.join(str(each * SECOND) for each in seconds)} 7 7\ncpu0 1 2 3\n")
    return path


def test_shares_are_those_of_the_time_between(tmp_path):
    #                                user nice system idle disk irq softirq stolen
    before = CoreUse.now(written(tmp_path / "a", 10, 0, 5, 80, 2, 1, 1, 1))
    after = CoreUse.now(written(tmp_path / "b", 40, 5, 10, 100, 12, 1, 1, 31))
    assert before.total == 100
    assert (after.total - before.total, after.busy - before.busy) == (100, 40)
    assert after.shares_since(before) == pytest.approx((0.4, 0.3), abs=0.01)
    assert before.shares_since(before) == (0.0, 0.0)


def test_a_few_ticks_are_no_share(tmp_path):
    before = CoreUse(total=100.0, busy=50.0, own=10.0, stolen=1.0)
    soon = CoreUse(total=100.0 + 2 / SECOND, busy=50.0 + 2 / SECOND, own=10.0, stolen=1.0)
    assert soon.shares_since(before) == (0.0, 0.0)


@pytest.mark.parametrize(
    "text", ["", "cpu 1 2 3\n", "cpu a b c d e f g h\n", "intr 1 2 3 4 5 6 7 8\n"]
)
def test_what_the_system_does_not_report_is_unknown(tmp_path, text):
    (tmp_path / "stat").write_text(text)
    assert CoreUse.now(tmp_path / "stat") is None
    assert CoreUse.now(tmp_path / "absent") is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat is Linux's")
def test_time_of_this_process_is_not_that_of_others():
    before, end = CoreUse.now(), time.monotonic() + 1.5
    while time.monotonic() < end:
        pass
    after = CoreUse.now()
    assert after.own - before.own > 0.1
    others, _ = after.shares_since(before)
    busy = (after.busy - before.busy) / (after.total - before.total)
    assert others <= busy
    assert others == pytest.approx(
        max(0.0, busy - (after.own - before.own) / (after.total - before.total))
    )
