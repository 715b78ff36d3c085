"""`logging`: the messages of a run during training."""

from penstock.config.section import Section, setting


class LoggingConfig(Section):
    """The run's log; `metrics.jsonl` in the run's folder always has every step."""

    every: int = setting(
        10,
        "steps between log lines, if there is no live view; slow steps have a line every 30 s too",
        unit="steps",
        ge=1,
    )
    tensorboard: bool = setting(
        False, "also write TensorBoard event files; needs the extra `tensorboard`"
    )
