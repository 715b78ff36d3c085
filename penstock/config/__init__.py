"""The configuration of a run: pydantic models, one file per section; input and output in YAML.

No module here imports torch, so that errors in a file are reported at once.
"""

from penstock.config.checkpoint import CheckpointConfig as CheckpointConfig
from penstock.config.cluster import ClusterConfig as ClusterConfig, cluster_keys as cluster_keys
from penstock.config.deciding_keys import (
    check_resumable as check_resumable,
    check_same_sparsity as check_same_sparsity,
    digest as digest,
    trajectory as trajectory,
)
from penstock.config.document import (
    FileKind as FileKind,
    dump_inline as dump_inline,
    dump_tables as dump_tables,
    read as read,
)
from penstock.config.engine import EngineConfig as EngineConfig
from penstock.config.fabric import MOST_RELAYS as MOST_RELAYS
from penstock.config.field_table import field_table as field_table
from penstock.config.load import check_data as check_data, load as load, to_config as to_config
from penstock.config.lora import LoraConfig as LoraConfig
from penstock.config.model import (
    FactoryModel as FactoryModel,
    HuggingFaceConfigModel as HuggingFaceConfigModel,
    HuggingFaceModel as HuggingFaceModel,
    ModelSpec as ModelSpec,
    PresetModel as PresetModel,
)
from penstock.config.model_file import read_model_file as read_model_file
from penstock.config.presets import resolve_preset as resolve_preset
from penstock.config.problems import Origin as Origin, explain as explain
from penstock.config.record import (
    check_run as check_run,
    is_run as is_run,
    load_run as load_run,
    no_such_run as no_such_run,
    recorded_flash as recorded_flash,
    verify_record as verify_record,
    write_record as write_record,
)
from penstock.config.root import Config as Config
from penstock.config.section import (
    Numbers as Numbers,
    Section as Section,
    refuse as refuse,
    refuse_all as refuse_all,
    setting as setting,
)
from penstock.config.size import (
    ByteSize as ByteSize,
    size_above as size_above,
    sizes_and_limit as sizes_and_limit,
)
from penstock.config.starter import commented as commented
