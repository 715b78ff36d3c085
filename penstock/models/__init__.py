"""Models from a preset, a Hugging Face configuration or user code, never built as a whole.

`ModelSource` is imported at first use: the files of a folder need neither torch nor transformers.
"""

from typing import TYPE_CHECKING, Any

from penstock.models.folder import other_files, tokenizer_files
from penstock.models.kept_folder import KEPT, keep_small_files, verify_kept

if TYPE_CHECKING:
    from penstock.models.embeddings import embeddings_and_heads
    from penstock.models.given_module import require_clear
    from penstock.models.inputs import TOKENS, InputSpec
    from penstock.models.lora import Adapter
    from penstock.models.modes import parts_in_eval_mode
    from penstock.models.source import ModelSource
    from penstock.models.weight_files import WeightFiles

__all__ = [
    "KEPT",
    "TOKENS",
    "Adapter",
    "InputSpec",
    "ModelSource",
    "WeightFiles",
    "embeddings_and_heads",
    "keep_small_files",
    "other_files",
    "parts_in_eval_mode",
    "require_clear",
    "tokenizer_files",
    "verify_kept",
]


def __getattr__(name: str) -> Any:
    if name in ("Adapter", "ModelSource"):
        from penstock.models import source

        return getattr(source, name)
    if name in ("TOKENS", "InputSpec"):
        from penstock.models import inputs

        return getattr(inputs, name)
    if name == "embeddings_and_heads":
        from penstock.models.embeddings import embeddings_and_heads

        return embeddings_and_heads
    if name == "parts_in_eval_mode":
        from penstock.models.modes import parts_in_eval_mode

        return parts_in_eval_mode
    if name == "require_clear":
        from penstock.models.given_module import require_clear

        return require_clear
    if name == "WeightFiles":
        from penstock.models.weight_files import WeightFiles

        return WeightFiles
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
