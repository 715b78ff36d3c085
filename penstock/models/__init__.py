"""Models by preset, Hugging Face configuration or the user's own code, never built whole.

`ModelSource` is loaded on first use: listing presets needs neither torch nor transformers.
"""

from typing import TYPE_CHECKING, Any

from penstock.models.presets import find_preset, preset_names, resolve_preset

if TYPE_CHECKING:
    from penstock.models.lora import Adapter
    from penstock.models.source import InputSpec, ModelSource

__all__ = ["Adapter", "InputSpec", "ModelSource", "find_preset", "preset_names", "resolve_preset"]


def __getattr__(name: str) -> Any:
    if name in ("Adapter", "ModelSource", "InputSpec"):
        from penstock.models import source

        return getattr(source, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
