"""`lora`: low-rank adapters beside frozen weights."""

from __future__ import annotations

from pydantic import model_validator

from penstock.config.section import Patterns, Section, refuse, setting


class LoraConfig(Section):
    """Adapters of low rank are trained in place of the weights that they stand beside."""

    rank: int | None = setting(
        None,
        "rank of the adapters; null: no adapters, the weights of the model are trained",
        example=8,
        ge=1,
        le=1 << 16,
    )
    alpha: float = setting(16.0, "an adapter's output is scaled by alpha / rank", gt=0)
    targets: Patterns = setting(
        (),
        "patterns of the names of weights that get an adapter: weights of Linear and Conv1D layers",
        example=["*.q_proj.weight", "*.v_proj.weight"],
    )
    dropout: float = setting(0.0, "dropout probability of an adapter's inputs", ge=0, lt=1)

    @model_validator(mode="after")
    def _consistent(self) -> LoraConfig:
        if self.rank is None:
            changed = self.model_fields_set - {"rank"}
            for key in sorted(changed):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise refuse(key, "has no effect without adapters; set lora.rank, such as 8")
        elif not self.targets:
            raise refuse(
                "targets",
                "expected at least one pattern with lora.rank, got none; for example "
                "lora.targets: ['*.q_proj.weight', '*.v_proj.weight'] (Llama) or "
                "['*.c_attn.weight'] (GPT-2)",
            )
        return self
