"""`run`: where a run lives, how long it is, and its seed."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from penstock.config.section import PathText, Section, setting


def _folder(path: Path) -> Path:
    if str(path) in ("", ".") or not str(path).isprintable():
        raise PydanticCustomError(
            "folder",
            "expected the name of a folder such as runs/mine, got {got}",
            {"got": repr(str(path))},
        )
    return path


class RunConfig(Section):
    """One run."""

    dir: Annotated[PathText, AfterValidator(_folder)] = setting(
        Path("runs/run"),
        "folder of the run: checkpoints, metrics, its configuration. Default for a file "
        "NAME.yaml: runs/NAME",
    )
    steps: int = setting(1000, "length of the run", unit="steps", ge=1, le=10**12)
    seed: int = setting(0, "seed of initial weights and dropout", ge=0, le=2**63 - 1)
