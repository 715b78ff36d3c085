"""`run`: where a run lives, how long it is, and its seed."""

from __future__ import annotations

from pathlib import Path

from penstock.config.section import PathText, Section, setting


class RunConfig(Section):
    """One run."""

    dir: PathText = setting(
        Path("runs/run"),
        "folder of the run: checkpoints, metrics, its configuration. "
        "Left out of a file NAME.yaml: runs/NAME",
    )
    steps: int = setting(1000, "length of the run", unit="steps", ge=1)
    seed: int = setting(0, "seed of initial weights and dropout", ge=0, le=2**63 - 1)
