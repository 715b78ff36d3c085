"""The models of `transformers` are scanned once, with the result of the library's own scans."""

import subprocess
import sys

IMPORT = """
import sys
from transformers.utils import import_utils

scanned = []
own = import_utils.os.scandir
import_utils.os.scandir = lambda path: scanned.append(str(path)) or own(path)
%s
found = sys.modules["transformers.models"]
print(len(scanned), sorted((name, sorted(of)) for name, of in found._import_structure.items()))
"""


def scans(statement):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT % statement], capture_output=True, text=True, check=True
    )
    count, structure = done.stdout.split(maxsplit=1)
    return int(count), structure


def test_second_scan_is_left_out():
    twice, wanted = scans("import transformers.models")
    once, found = scans("import penstock.models.huggingface_config")
    assert twice > 100  # or the library has changed, and there is nothing to leave out
    assert once < twice / 4
    assert found == wanted
