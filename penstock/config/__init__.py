"""The configuration of a run: pydantic models, one file per section; input and output in YAML.

No module here imports torch, so that errors in a file are reported at once.
"""

from penstock.config.checkpoint import CheckpointConfig
from penstock.config.cluster import ClusterConfig, cluster_keys
from penstock.config.deciding_keys import (
    check_resumable,
    check_same_sparsity,
    digest,
    trajectory,
)
from penstock.config.document import FileKind, dump_inline, dump_tables, read
from penstock.config.engine import EngineConfig
from penstock.config.fabric import MOST_RELAYS, FabricConfig
from penstock.config.field_table import field_table
from penstock.config.load import check_data, load, to_config
from penstock.config.lora import LoraConfig
from penstock.config.model import (
    FactoryModel,
    HuggingFaceConfigModel,
    HuggingFaceModel,
    ModelSpec,
    PresetModel,
)
from penstock.config.optimizer import GroupConfig, OptimizerConfig
from penstock.config.presets import resolve_preset
from penstock.config.problems import Origin, explain
from penstock.config.record import check_run, load_run, recorded_flash, verify_record, write_record
from penstock.config.root import Config
from penstock.config.schedule import ScheduleConfig
from penstock.config.section import Numbers, Section, refuse, refuse_all, setting
from penstock.config.size import ByteSize, size_above
from penstock.config.sparsity import SparsityConfig
from penstock.config.starter import commented

__all__ = [
    "MOST_RELAYS",
    "ByteSize",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "EngineConfig",
    "FabricConfig",
    "FactoryModel",
    "FileKind",
    "GroupConfig",
    "HuggingFaceConfigModel",
    "HuggingFaceModel",
    "LoraConfig",
    "ModelSpec",
    "Numbers",
    "OptimizerConfig",
    "Origin",
    "PresetModel",
    "ScheduleConfig",
    "Section",
    "SparsityConfig",
    "check_data",
    "check_resumable",
    "check_run",
    "check_same_sparsity",
    "cluster_keys",
    "commented",
    "digest",
    "dump_inline",
    "dump_tables",
    "explain",
    "field_table",
    "load",
    "load_run",
    "read",
    "recorded_flash",
    "refuse",
    "refuse_all",
    "resolve_preset",
    "setting",
    "size_above",
    "to_config",
    "trajectory",
    "verify_record",
    "write_record",
]
