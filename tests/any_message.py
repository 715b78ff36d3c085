"""Messages that no node would send, for tests that hand them to whatever takes messages."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from penstock.distributed.protocol.messages import Message, MessageType, message_with

# What is right, of which one part is then something else.
_RIGHT = (
    {"shards": [1, 2], "engines": [100], "addresses": {"100": ["127.0.0.1", 9]}},
    {"total": 3, "first": 0, "count": 1, "seed": 0, "scale": 1.0, "rows": [["x", "uint8", [2]]]},
    {"losses": ["0x1p0"] * 4},
    {
        "squares": ["0x1p0"],
        "silent": [0],
        "missing": ["w"],
        "non_finite": {"0": ["w"]},
        "zero": {"w": 1},
    },
    {"step": 1, "norm": "0x1p0", "clip_scale": "0x1p0", "learning_rate": "0x1p0"},
    {"error": "ValueError", "text": "it failed", "about": 100},
    {"text": "a checksum", "peer": 1},
    {"progress": 1, "busy": False, "peak_bytes": 1, "computed": [1.0, 2]},
    {"steps": [0, 1], "to": 0, "norm": "0x1p0", "engines": 2, "digest": "d", "node": 3},
    {"worker": "w", "listens": ["127.0.0.1", 9], "shard": 0},
    {"node": 3, "place": [0, 0], "opens": "empty", "run": {"config": {}}, "shards_there": [1]},
    {"bytes": 2, "arrays": [["x", "uint8", [2]]], "says": {"method": "status", "with": {}}},
    {"bytes": 0, "arrays": [], "says": {}},
    {"bytes": 0, "arrays": [], "says": {"method": "take_copy", "with": {"source": 7, "step": 1}}},
    {"listens": ["127.0.0.1", 9]},
    {"stored": 1},
)
_SMALL = st.integers(0, 4) | st.integers(0, 2**32 - 1)

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@st.composite
def bodies(draw: st.DrawFn) -> dict:
    """A body in which nothing or one part is not what it should be."""
    body = dict(draw(st.sampled_from(_RIGHT)))
    if draw(st.booleans()):
        key = draw(st.sampled_from(sorted(body)))
        body[key] = draw(anything | st.lists(anything, min_size=2, max_size=2))
    return body


def messages(senders: list[int]) -> st.SearchStrategy[Message]:
    """Messages of all kinds, with whatever body, from one of these senders."""
    return st.builds(
        lambda kind, payload, **fields: message_with(payload, kind=kind, **fields),
        kind=st.sampled_from(MessageType),
        payload=st.none() | st.binary(max_size=16).map(lambda b: np.frombuffer(b, np.uint8).copy()),
        epoch=st.integers(0, 3),
        sender=st.sampled_from(senders),
        step=st.integers(0, 3),
        op=_SMALL,
        chunk=_SMALL,
        level=st.integers(0, 3) | st.integers(0, 2**16 - 1),
        index=_SMALL,
        body=bodies(),
    )
