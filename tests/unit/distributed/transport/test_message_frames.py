"""Frames and descriptions of arrays: what is malformed is refused, whatever its bytes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from penstock.distributed.protocol.messages import (
    HEADER_BYTES,
    Message,
    MessageType,
    lengths,
    message_with,
    pack,
    pack_arrays,
    unpack,
    unpack_arrays,
)
from penstock.errors import CorruptionError


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES + 200))
def test_random_frames_raise_corruption_error(frame):
    with pytest.raises(CorruptionError):
        taken(frame)


def taken(frame: bytes) -> Message:
    """Take a frame as a link does."""
    header, rest = frame[:HEADER_BYTES], frame[HEADER_BYTES:]
    body_bytes, payload_bytes = lengths(header)
    assert body_bytes + payload_bytes == len(rest)
    return unpack(header, rest[:body_bytes], np.frombuffer(rest[body_bytes:], np.uint8).copy())


@settings(max_examples=300, deadline=None)
@given(st.integers(min_value=0), st.integers(0, 7))
def test_every_flipped_bit_of_frame_is_detected(place, bit):
    message = message_with(
        np.arange(10),
        kind=MessageType.GRADIENT,
        epoch=3,
        sender=9,
        body={"a": [1, 2.5]},
        to=4,
        step=8,
    )
    header, body = pack(message)
    frame = bytearray(header + body + message.payload.tobytes())
    frame[place % len(frame)] ^= 1 << bit
    with pytest.raises(CorruptionError):
        taken(bytes(frame))


def test_every_flipped_bit_of_header_is_detected_before_its_lengths_are_used():
    """A receiver that believed a greater length would wait for bytes that never come."""
    message = message_with(np.arange(10), kind=MessageType.GRADIENT, epoch=3, sender=9, to=4)
    header, _ = pack(message)
    assert lengths(header) == (0, 80)
    for bit in range(8 * len(header)):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError, match="header is damaged: its checksum is wrong"):
            lengths(bytes(flipped))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(JSON, max_size=4), st.binary(max_size=64))
def test_random_array_descriptions_raise_corruption_error(described, data):
    try:
        arrays = unpack_arrays(described, np.frombuffer(data, np.uint8))
    except CorruptionError:
        return
    assert sum(array.nbytes for array in arrays.values()) >= len(data)


def came_back(array: np.ndarray) -> int:
    """Require that an array comes back as it was; return how many bytes it was on the way."""
    described, payload = pack_arrays({"a": array, "b": np.zeros((0, 4), np.float32)})
    found = unpack_arrays(json.loads(json.dumps(described)), payload)
    np.testing.assert_array_equal(found["a"], array)
    assert (found["a"].dtype, found["a"].shape) == (array.dtype, array.shape)
    assert found["b"].shape == (0, 4)
    return payload.nbytes


@pytest.mark.parametrize(
    ("ends", "each"),
    [
        ((0, 50_256), 2),
        ((-100, 32_767), 2),
        ((-100, 50_256), 4),
        ((-1, 127), 1),
        ((0, 1 << 40), 8),
        ((-1, (1 << 63) - 1), 8),
        ((-(1 << 63), 0), 8),
    ],
)
def test_integers_use_smallest_type_that_holds_them(ends, each):
    assert came_back(np.array([ends, ends, ends])) == 6 * each


def test_other_arrays_keep_their_type():
    for kind in ("bool", "uint8", "float16", "float32", "float64"):
        array = np.arange(6).astype(kind).reshape(3, 2)[:, ::-1]
        assert came_back(array) == array.nbytes
    assert came_back(np.array([(1 << 64) - 1], np.uint64)) == 8
    assert came_back(np.array(7)) == 1


@pytest.mark.parametrize("types", [("float32", "uint8"), ("bool", "uint8"), ("int64", "object")])
def test_lossy_array_types_are_refused(types):
    with pytest.raises(CorruptionError, match="expected name, types and shape of an array"):
        unpack_arrays([["a", *types, [1]]], np.zeros(1, np.uint8))
