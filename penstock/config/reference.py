"""The reference page of the configuration, generated from the models so that it is never outdated.

`python -m penstock.config.reference > docs/configuration.md` writes it; a test compares the two.
"""

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.config.field_table import field_table
from penstock.config.model import (
    FactoryModel,
    HuggingFaceConfigModel,
    HuggingFaceModel,
    PresetModel,
)
from penstock.config.optimizer import GroupConfig
from penstock.config.root import Config

_HEAD = """\
# Configuration

A run is one YAML file. Every key but `model` has a default. Any key can be set on the command
line: `penstock train run.yaml optimizer.learning_rate=1e-4 model.n_layer=6`. `penstock init`
writes a file in which every key is explained. Unknown keys are refused, with the closest known
one; paths are relative to the current folder; sizes are written `4GiB`, `512MiB` or `2GB`.

This page is made from the code: `python -m penstock.config.reference > docs/configuration.md`.
"""


def markdown() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    plain = [
        (key, info)
        for key, info in Config.model_fields.items()
        if key != "model" and not _is_section(info)
    ]
    parts.append("## Top level\n\n" + field_table(plain))
    parts.append(_model())
    for key, info in Config.model_fields.items():
        if _is_section(info):
            parts += _section(key, info)
    return "\n".join(parts)


def _model() -> str:
    forms = (
        (
            "A preset",
            "`model: NAME`, or `model: {preset: NAME, KEY: VALUE ...}`. KEY is a key of the "
            "model's Hugging Face configuration, such as `n_layer` (GPT), `num_hidden_layers` or "
            "`vocab_size`. Dropout is 0 in every preset; `dropout: 0.1` sets every dropout of the "
            "model",
            PresetModel,
        ),
        (
            "A Hugging Face checkpoint, to fine-tune",
            "`model: {hf: FOLDER}`, or `model: {hf: FOLDER, KEY: VALUE ...}`. KEY is a key of the "
            "folder's config.json to change",
            HuggingFaceModel,
        ),
        ("A Hugging Face configuration", "`model: {hf_config: ...}`", HuggingFaceConfigModel),
        ("Your own module over tokens", "`model: {factory: ...}`", FactoryModel),
    )
    text = "## `model`\n\n" + (Config.model_fields["model"].description or "") + ".\n"
    for title, how, form in forms:
        rows = [(k, i) for k, i in form.model_fields.items() if k != "overrides"]
        text += f"\n{title}: {how}\n\n" + field_table(rows)
    return text


def _section(key: str, info: FieldInfo) -> list[str]:
    owner = info.annotation
    assert isinstance(owner, type)
    assert issubclass(owner, BaseModel)
    plain = [(k, i) for k, i in owner.model_fields.items() if not _is_section(i)]
    parts = [f"## `{key}`\n\n{(info.description or '').capitalize()}.\n\n" + field_table(plain)]
    if key == "optimizer":
        parts.append(
            "## `optimizer.groups[]`\n\n" + field_table(list(GroupConfig.model_fields.items()))
        )
    for inner, inner_info in owner.model_fields.items():
        if _is_section(inner_info):
            parts += _section(f"{key}.{inner}", inner_info)
    return parts


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


if __name__ == "__main__":
    print(markdown(), end="")
