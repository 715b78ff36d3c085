"""`checkpoint`: when a run is saved, and which checkpoints are kept."""

from penstock.config.section import Section, setting
from penstock.config.size import ByteSize


class CheckpointConfig(Section):
    """Saving; the end of a run and a requested stop always save."""

    every: int | None = setting(
        500, "steps between checkpoints; null: only at the end", unit="steps", example=500, ge=1
    )
    every_minutes: float | None = setting(
        None,
        "minutes between checkpoints, in addition to `every`; null: only `every` counts. The time "
        "of a checkpoint does not change the result",
        unit="minutes",
        example=30.0,
        gt=0,
    )
    buffer: ByteSize = setting(
        ByteSize(128 << 20),
        "memory for values that the next update overwrites before the running checkpoint has "
        "written them; when the memory is full, training waits for the disk",
        unit="bytes",
    )
    keep_last: int = setting(2, "newest checkpoints to keep", unit="checkpoints", ge=1)
    best: bool = setting(
        True, "also keep the checkpoint with the lowest held-out loss, if there are evaluations"
    )
