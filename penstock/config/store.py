"""`store`: how weights, gradients and optimizer state are kept."""

from __future__ import annotations

from typing import Literal

from penstock.config.section import Section, setting


class StoreConfig(Section):
    """The store's choices."""

    gradients: Literal["fp32", "bf16", "auto"] = setting(
        "auto", "type in which the store keeps gradients; auto: that of `precision`"
    )
