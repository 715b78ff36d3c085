"""What `penstock plan` answers to a run that no machine can do, to the letter."""

import re

import pytest
from command_line import penstock

HOST = """
name: desk
kind: host
engine: {is_host: true, rates: [{work: product, rates: [1e11]}, {work: pointwise, rates: [1e10]}]}
store: {memory: 24GiB, rates: [{work: update, rates: [1e10]}]}
"""
RACK = """
name: rack
kind: cluster
engine: {memory: 1GiB, rates: [{work: product, rates: [1e11]}, {work: pointwise, rates: [1e10]}]}
store: {memory: 24GiB, rates: [{work: update, rates: [1e10]}]}
link: {weights: 1e9, gradients: 1e9}
"""
TINY = ("tiny", "batch.size=8", "batch.micro=1", "data.sequence_length=32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("machines")
    (folder / "desk.yaml").write_text(HOST)
    (folder / "rack.yaml").write_text(RACK)
    (folder / "disk.yaml").write_text(
        HOST.replace(
            "24GiB,",
            "24GiB, flash: {rates: [{work: flash read, rates: [1e9]}, "
            "{work: flash write, rates: [1e9]}]},",
        )
    )
    (folder / "small.yaml").write_text(HOST.replace("24GiB", "1KiB"))
    (folder / "broken.yaml").write_text(HOST.replace("1e11", "-1e11").replace("24GiB", "24 rooms"))
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (
            (*TINY, "--machine", "small.yaml"),
            5,
            r"this run needs at least \S+ MiB, this machine has 1\.00 KiB \(store "
            r"\(\S+ parameters\): \S+ MiB; .*\); make the model smaller, or set "
            r"store\.flash\.path to a folder on a fast disk",
        ),
        (
            (*TINY, "--machine", "rack.yaml", "--sweep", "engines=1,2", "--csv", "no/folder.csv"),
            2,
            r"--csv: expected a file in a folder that exists, got no/folder\.csv",
        ),
        (
            (*TINY, "--machine", "rack.yaml", "--sweep", "engines=1,2", "--plot", "plot.jpg"),
            2,
            r"plot\.jpg: expected a name that ends in \.png or \.svg, got '\.jpg'",
        ),
        (
            (*TINY, "engines=0", "--machine", "cs2"),
            2,
            r"command line, engines=0: expected a number from 1 up, got 0; for "
            r"example engines: 1",
        ),
        (
            (*TINY, "store.flash.path=flash", "--machine", "desk.yaml"),
            2,
            r"store\.flash\.path: the machine desk has no disk \(store\.flash\); remove the key, "
            r"or describe the disk in the machine's file",
        ),
        (
            (*TINY, "store.dram=100KiB", "--machine", "desk.yaml"),
            5,
            r"store\.dram: the store of tiny needs [\d,]+ bytes of memory, the limit is 102,400; "
            r"raise it, or set store\.flash\.path to a folder",
        ),
        (
            (*TINY, "store.flash.path=flash", "store.flash.size=1MiB", "--machine", "disk.yaml"),
            5,
            r"store\.flash\.size: tiny needs [\d,]+ bytes on flash for 3 versions of its state, "
            r"the limit is 1,048,576; raise it, or lower store\.flash\.keep_steps",
        ),
        (
            (*TINY, "--machine", "broken.yaml"),
            2,
            r"broken\.yaml:4: engine\.rates\[0\]\.rates: expected numbers above 0, got -1e\+11; "
            r"correct or remove it\n"
            r"broken\.yaml:5: store\.memory: expected a size such as 4GiB, 512MiB or 2GB, got "
            r"'24 rooms'; 'rooms' is not a unit: use KiB, MiB, GiB or TiB",
        ),
        (
            (*TINY, "engine.memory=100KB", "--machine", "desk.yaml"),
            5,
            r"the engine needs (\S+) MiB for a step of 8 micro-batches, the budget is "
            r"97\.66 KiB; the peak is at stage \S+\. Raise engine\.memory to at least \1 MiB, or "
            r"lower data\.sequence_length\.",
        ),
        (
            (*TINY, "engines=4", "engine.memory=100KB", "--machine", "rack.yaml"),
            5,
            r"the engine needs (\S+) MiB for a step of 2 micro-batches, the budget is "
            r"97\.66 KiB; the peak is at stage \S+\. Raise engine\.memory to at least \1 MiB, or "
            r"lower data\.sequence_length\.",
        ),
        (
            (*TINY, "engine.memory=3MiB", "batch.size=64", "--machine", "desk.yaml"),
            5,
            r"the engine needs (\S+) MiB for a step of 64 micro-batches, the budget is 3\.00 MiB; "
            r"the peak is at stage \S+\. Raise engine\.memory to at least \1 MiB, or lower "
            r"batch\.size to \d+ or data\.sequence_length\.",
        ),
        (
            (*TINY, "engine.memory=100KB", "--machine", "rack.yaml", "--target", "3 days"),
            5,
            r"the engine needs (\S+) MiB for a step of 1 micro-batch, .*",
        ),
        (
            (*TINY, "run.steps=100000000", "--machine", "rack.yaml", "--target", "1 second"),
            2,
            r"--target: 8 engines, the most that a batch of 8 micro-batches allows, take "
            r".* for 100,000,000 steps, expected 1\S* s; raise batch\.size and lower "
            r"run\.steps, or choose another machine",
        ),
    ],
    ids=[
        "small",
        "no folder",
        "no picture",
        "zero engines",
        "no disk",
        "memory of the store",
        "size on flash",
        "impossible machine",
        "one",
        "four",
        "large batch",
        "any",
        "too slow",
    ],
)
def test_run_that_cannot_be_is_refused(folder, arguments, code, text):
    done = penstock("plan", *arguments, cwd=folder)
    assert re.fullmatch(f"error: {text}\n", done.stderr, re.DOTALL), done.stderr
    assert done.returncode == code
    assert done.stdout == ""
