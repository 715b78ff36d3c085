"""Models from a preset, a Hugging Face configuration or user code, never built as a whole.

`ModelSource` is imported at first use: the files of a folder need neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily
from penstock.models.folder import other_files as other_files, tokenizer_files as tokenizer_files
from penstock.models.kept_folder import (
    KEPT as KEPT,
    config_files as config_files,
    keep_small_files as keep_small_files,
    verify_kept as verify_kept,
)

if TYPE_CHECKING:
    from penstock.models.embeddings import embeddings_and_heads as embeddings_and_heads
    from penstock.models.given_module import require_clear as require_clear
    from penstock.models.inputs import TOKENS as TOKENS, InputSpec as InputSpec
    from penstock.models.lora import Adapter as Adapter
    from penstock.models.modes import parts_in_eval_mode as parts_in_eval_mode
    from penstock.models.source import ModelSource as ModelSource
    from penstock.models.stored_buffers import buffer_files as buffer_files
    from penstock.models.unregistered import unregistered_weights as unregistered_weights
    from penstock.models.weight_files import WeightFiles as WeightFiles

__getattr__ = lazily(__name__, __file__)
