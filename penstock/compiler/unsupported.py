"""The error for code in a model's forward that no program can reproduce exactly."""


class Unsupported(Exception):
    """Raised inside a forward that is being captured; `capture` adds the module and the line.

    `reason` says what the forward does, `advice` what to do instead.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice
