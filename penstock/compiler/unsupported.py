"""Code in a model's forward that no program can reproduce exactly: its error, and advice."""

_NEEDS_A_VALUE = (
    *("data-dependent", "DataDependent", "DynamicOutputShape", "unbacked"),
    "for tensor subclasses",
)


class Unsupported(Exception):
    """Raised inside a forward that is being captured; `capture` adds the module and the line.

    `reason` says what the forward does, `advice` what to do instead.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, without its full stop."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].strip().rstrip(".")


def advice_on(error: Exception) -> str:
    """Return what to do about an error of PyTorch that stopped a trace."""
    if isinstance(error, Unsupported):
        return error.advice
    text = f"{type(error).__name__} {error}"
    if any(sign in text for sign in _NEEDS_A_VALUE):
        return (
            "The forward needs the value of a tensor, which no ahead-of-time graph can hold: use "
            "torch.where or masking, or make the decision outside the model."
        )
    if "doesn't match mode" in text:
        return "An engine keeps no state between steps: write to a copy (.clone())."
    if isinstance(error, NotImplementedError) or "fake" in text.lower():
        return (
            "An operator has no shape rule for tensors without data: use a built-in PyTorch "
            "operator, or register one with torch.library.register_fake."
        )
    return "Check that the module runs with these inputs: forward(**inputs) in plain PyTorch."
