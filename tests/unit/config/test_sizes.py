"""Byte sizes, against arithmetic that anyone can do by hand."""

import random

import pytest

from penstock.config import ByteSize, sizes_and_limit

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4GiB", 4 * 1024**3),
        ("512MiB", 512 * 1024**2),
        ("2GB", 2_000_000_000),
        ("1.5 TiB", 3 * 1024**4 // 2),
        ("  10kib ", 10240),
        ("7B", 7),
        (123456, 123456),
        ("90071992547409931B", 90071992547409931),
    ],
)
def test_a_size_is_read_exactly(text, count):
    assert ByteSize.parse(text) == count


@pytest.mark.parametrize("seed", range(3))
def test_any_size_survives_printing_and_reading(seed):
    draw = random.Random(seed)
    for _ in range(200):
        size = ByteSize(draw.randrange(1, 1 << draw.randrange(1, 60)) << draw.choice([0, 10, 20]))
        assert ByteSize.parse(str(size)) == size, f"seed {seed}"


def test_a_size_prints_in_the_unit_with_the_shortest_number_that_loses_nothing():
    assert str(ByteSize.parse("4GiB")) == "4GiB"
    assert str(ByteSize.parse("4096MiB")) == "4GiB"
    assert str(ByteSize.parse("1536MiB")) == "1536MiB"
    assert str(ByteSize(1000)) == "1000B"
    assert str(ByteSize.parse("40GB")) == "40GB"
    assert str(ByteSize.parse("2400TB")) == "2400TB"
    assert str(ByteSize.parse("2PB")) == "2PB"
    assert str(ByteSize.parse("3PiB")) == "3PiB"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "4 GX",
            "expected a size such as 4GiB, 512MiB or 2GB, got '4 GX'; 'GX' is not a unit: use "
            "KiB, MiB, GiB or TiB",
        ),
        (
            "4",
            "expected a size such as 4GiB, 512MiB or 2GB, got '4'; "
            "4 has no unit: use KiB, MiB, GiB or TiB",
        ),
        (
            "much",
            "expected a size such as 4GiB, 512MiB or 2GB, got 'much'; write a number and a unit",
        ),
        (
            "-1GiB",
            "expected a size such as 4GiB, 512MiB or 2GB, got '-1GiB'; write a number and a unit",
        ),
        (
            10,
            "expected a size such as 4GiB, 512MiB or 2GB, got 10; it has no unit: write 10GiB",
        ),
        (
            0,
            "expected a size such as 4GiB, 512MiB or 2GB, got 0; it must be at least one byte",
        ),
        (
            True,
            "expected a size such as 4GiB, 512MiB or 2GB, got True; write a number and a unit",
        ),
        (
            2.5,
            "expected a size such as 4GiB, 512MiB or 2GB, got 2.5; write a number and a unit",
        ),
    ],
)
def test_invalid_size_is_refused_with_the_expected_form(value, message):
    with pytest.raises(ValueError, match="expected") as raised:
        ByteSize.parse(value)
    assert str(raised.value) == message


def test_sizes_and_their_limit_share_a_unit():
    assert sizes_and_limit([500 << 20, 1], 2 << 30) == ["0.49 GiB", "0.01 GiB", "2.00 GiB"]
    assert sizes_and_limit([900 << 20, 1 << 10], 0) == ["900.00 MiB", "0.01 MiB", "0.00 MiB"]
    assert sizes_and_limit([0], 0) == ["0.00 KiB", "0.00 KiB"]


def test_size_above_its_limit_is_printed_above_it():
    assert sizes_and_limit([int(1.236 * GIB)], int(1.2315 * GIB)) == ["1.24 GiB", "1.23 GiB"]
    assert sizes_and_limit([GIB + 1], GIB) == ["1.01 GiB", "1.00 GiB"]


def test_small_part_of_a_large_sum_is_at_most_a_hundredth_of_a_gib_too_large():
    sizes = [3 << 20, 1536 << 30]
    assert sizes_and_limit(sizes, 1024 << 30) == ["0.01 GiB", "1536.00 GiB", "1024.00 GiB"]


def test_limit_is_not_printed_above_its_value():
    assert sizes_and_limit([2 * GIB], int(1.239 * GIB)) == ["2.00 GiB", "1.23 GiB"]
