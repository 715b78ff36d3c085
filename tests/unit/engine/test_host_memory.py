"""How the C library keeps and returns the pages of freed tensors."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource

import torch
from penstock.engine.host_memory import keep_freed_pages, return_unused_pages

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

assert keep_freed_pages()
tensors = [torch.ones(1 << 20) for _ in range(64)]  # 256 MiB
above = torch.ones(100)  # the heap cannot shrink below it
full = resident_mib()
del tensors
found = [resident_mib() - full]
for steps in (0, 3, 4):
    return_unused_pages(steps)
    found.append(resident_mib() - full)
print(*found, float(above.sum()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are those of Linux")
def test_free_pages_are_returned_after_steps_whose_number_is_a_power_of_two():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    freed, after_none, after_three, after_four, total = map(float, done.stdout.split())
    assert freed > -20  # kept
    assert after_none > -20
    assert after_three > -20
    assert after_four < -220
    assert total == 100
