"""Whole runs with a store on flash: the bits of a run in memory, resumed, inspected, repaired."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock import Trainer
from penstock.cli.app import app
from penstock.errors import BudgetError, CorruptionError
from penstock.events import StepDone

ROOT = Path(__file__).parents[2]


def config(folder: Path, steps: int, on_flash: bool, **store) -> dict:
    if on_flash:
        store = {"dram": "16MiB", "flash": {"path": str(folder / "flash")}, **store}
    return {
        "model": {"preset": "tiny", "n_positions": 64},
        "data": {"input": [str(ROOT / "LICENSE")], "validation": 0.2},
        "batch": {"size": 8, "micro": 2},
        "precision": "bf16",
        "optimizer": {"learning_rate": 1e-3, "schedule": {"name": "constant"}},
        "store": store,
        "run": {"dir": str(folder), "steps": steps},
        "evaluation": {"every": 3, "batches": 1},
    }


def inspected(*arguments):
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], catch_exceptions=True)
    return result


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory") / "run"
    trainer = Trainer(config(folder, 7, on_flash=False))
    trainer.train()
    return (
        trainer.store.content_hash(),
        trainer.evaluate(),
        "".join(trainer.generate("The ", seed=1)),
    )


def test_a_run_on_flash_has_the_bits_of_one_in_memory(in_memory, tmp_path):
    steps = []

    def listen(event):
        if isinstance(event, StepDone):
            steps.append(event)

    trainer = Trainer(config(tmp_path / "run", 7, on_flash=True), on_event=listen)
    trainer.train()
    written = trainer.evaluate(), "".join(trainer.generate("The ", seed=1))
    trainer.close()
    assert written == in_memory[1:]
    assert inspected(tmp_path / "run", "--hash").output == in_memory[0] + "\n"
    assert sum(step.flash_written_bytes for step in steps) > 0
    export = Trainer(config(tmp_path / "run", 7, on_flash=True), must_exist=True)
    export.export(tmp_path / "exported")
    export.close()
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_a_run_that_stops_goes_on_to_the_same_bits(in_memory, tmp_path):
    for steps in (2, 5, 7):
        trainer = Trainer(config(tmp_path / "run", steps, on_flash=True))
        trainer.train()
        trainer.close()
    assert inspected(tmp_path / "run", "--hash").output == in_memory[0] + "\n"


def test_damage_is_named_and_repair_goes_back_to_what_is_whole(in_memory, tmp_path):
    settings = config(tmp_path / "run", 7, on_flash=True)
    trainer = Trainer(settings)
    trainer.train()
    unit = trainer.store._layout.units[1]
    place = unit.stream_offset(trainer.store._version._place[1])
    trainer.close()
    extents = tmp_path / "run" / "flash" / "extents"
    with extents.open("r+b") as file:
        file.seek(place + 100)
        byte = file.read(1)[0]
        file.seek(place + 100)
        file.write(bytes([byte ^ 8]))
    shown = inspected(tmp_path / "run")
    assert isinstance(shown.exception, CorruptionError)
    assert "durable      step 6  all checksums match" in shown.output
    assert "durable      step 7  DAMAGED (newest)" in shown.output
    assert "extents: damaged in bytes" in str(shown.exception)
    repaired = inspected(tmp_path / "run", "--repair")
    assert repaired.output == (
        f"{tmp_path / 'run' / 'flash'} stands at step 6, all checksums match\n"
    )
    again = Trainer(settings)
    assert again.step == 6
    again.train()
    again.close()
    assert inspected(tmp_path / "run", "--hash").output == in_memory[0] + "\n"


def test_budgets_that_cannot_hold_are_refused_with_the_arithmetic(tmp_path):
    with pytest.raises(BudgetError, match=r"the weights of two stages need [\d,]+ bytes, blocks"):
        Trainer(config(tmp_path / "a", 7, on_flash=True, dram="1MiB"))
    flash = {"path": str(tmp_path / "b" / "flash"), "size": "1MiB"}
    with pytest.raises(BudgetError, match=r"store\.flash\.size: .* needs [\d,]+ bytes on flash"):
        Trainer(config(tmp_path / "b", 7, on_flash=True, flash=flash))
    with pytest.raises(BudgetError, match=r"store\.dram: the store of tiny needs [\d,]+ bytes"):
        Trainer(config(tmp_path / "c", 7, on_flash=False, dram="1MiB"))
