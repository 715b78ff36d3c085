"""The starter file: a configuration in which every key is explained where it stands."""

import textwrap
from typing import Any

from penstock.config.document import dump_inline
from penstock.config.root import Config
from penstock.config.section import Section

_HEAD = """\
# A run of Penstock. Every key is here with its meaning; a key that you delete has its default.
#   penstock train FILE [key=value ...]      e.g. optimizer.learning_rate=1e-4 engines=2
"""
_MODELS = """\
# Other models:  model: {preset: gpt2, n_layer: 6}            a preset with its numbers changed
#                model: {hf: path/to/folder}                  a checkpoint to fine-tune
#                model: {hf_config: path/to/config.json}      any model of transformers
#                model: {factory: "package.module:function"}  your own nn.Module
"""


def commented(config: Config) -> str:
    """Return YAML that loads as `config`, each key under its description and unit."""
    lines = _HEAD.splitlines()
    values = config.to_mapping()
    for key, info in type(config).model_fields.items():
        value = getattr(config, key)
        lines.append("")
        if isinstance(value, Section) and key != "model":
            lines += [f"# {info.description}", f"{key}:"]
            lines += _section_lines(value, values[key], depth=1)
            continue
        lines += _comment(info, 0)
        lines.append(f"{key}: {dump_inline(values[key])}")
        if key == "model":
            lines += _MODELS.splitlines()
    return "\n".join(lines) + "\n"


def _section_lines(section: Section, values: dict[str, Any], depth: int) -> list[str]:
    indent = "  " * depth
    lines: list[str] = []
    for key, info in type(section).model_fields.items():
        value = getattr(section, key)
        lines += _comment(info, depth)
        if isinstance(value, Section):
            lines.append(f"{indent}{key}:")
            lines += _section_lines(value, values[key], depth + 1)
        else:
            lines.append(f"{indent}{key}: {dump_inline(values[key])}")
    return lines


def _comment(info: Any, depth: int) -> list[str]:
    extra = info.json_schema_extra or {}
    text = info.description
    if "unit" in extra:
        text += f" [{extra['unit']}]"
    if "example" in extra:
        text += f"; for example {dump_inline(extra['example'])}"
    indent = "  " * depth
    return textwrap.wrap(
        text, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
