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
    from penstock.models.adapter import Adapter as Adapter
    from penstock.models.given_module import require_clear as require_clear
    from penstock.models.inputs import TOKENS as TOKENS, InputSpec as InputSpec
    from penstock.models.model_key import ModelKey as ModelKey
    from penstock.models.opened_folder import OpenedFolder as OpenedFolder
    from penstock.models.pretrained import Pretrained as Pretrained
    from penstock.models.recalled import (
        ModelSummary as ModelSummary,
        is_causal_with_new_values as is_causal_with_new_values,
        kept_of as kept_of,
        recalled_model as recalled_model,
    )
    from penstock.models.source import ModelSource as ModelSource
    from penstock.models.stored_buffers import buffer_files as buffer_files
    from penstock.models.weight_files import WeightFiles as WeightFiles
    from penstock.models.weight_origins import (
        Origin as Origin,
        read_origins as read_origins,
        written_origins as written_origins,
    )
    from penstock.models.weight_recipe import WeightRecipe as WeightRecipe
    from penstock.models.written_recipe import (
        read_recipe as read_recipe,
        write_recipe as write_recipe,
    )

__getattr__ = lazily(__name__, __file__)
