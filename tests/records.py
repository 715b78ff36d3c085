"""Prompts with completions for tests, and what a model is to read of each, written out by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path

END = 256  # of a document, in byte tokens

Record = tuple[str, str]


def random_records(seed: int, count: int, longest: int = 30) -> list[Record]:
    """Return prompts (some empty) and completions of random words."""
    rng = random.Random(seed)
    words = ["flow", "gate", " ", "weir", "7", "é", "東京", "\n"]

    def text(least: int) -> str:
        return "".join(rng.choices(words, k=rng.randint(least, longest // 4)))

    return [(text(0), text(1)) for _ in range(count)]


def write_records(path: Path, records: list[Record], prompt="prompt", completion="completion"):
    """Write records as JSON Lines."""
    lines = [json.dumps({prompt: p, completion: c}) + "\n" for p, c in records]
    path.write_text("".join(lines))
    return path


def byte_tokens(record: Record) -> tuple[list[int], list[int]]:
    """Return the byte tokens of the prompt and of the completion with its end."""
    prompt, completion = (list(text.encode()) for text in record)
    return prompt or [END], [*completion, END]
