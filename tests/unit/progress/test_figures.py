"""Numbers as people read them."""

import math

import pytest

from penstock.progress.figures import (
    show_bytes,
    show_comparable_durations,
    show_count,
    show_dollars,
    show_duration,
    show_energy,
    show_flops,
    show_rate,
    sparkline,
)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (show_bytes(0), "0 B"),
        (show_bytes(999), "999 B"),
        (show_bytes(1024), "1.00 KiB"),
        (show_bytes(1536 * 2**20), "1.50 GiB"),
        (show_bytes(350 * 2**30), "350 GiB"),
        (show_bytes(5000 * 2**40), "4.88 PiB"),
        (show_dollars(0), "0"),
        (show_dollars(0.001), "under 0.01"),
        (show_dollars(12.3), "12.30"),
        (show_dollars(1234.4), "1,234"),
        (show_energy(0.0012), "1.20 Wh"),
        (show_energy(35), "35.0 kWh"),
        (show_energy(53_900_000), "53.9 GWh"),
        (show_rate(1.5 * 2**30), "1.50 GiB/s"),
        (show_rate(796 * 2**20), "796 MiB/s"),
        (show_rate(500), "500 B/s"),
        (show_count(12), "12"),
        (show_count(124_439_808), "124M"),
        (show_count(16384), "16.4k"),
        (show_count(174.6e9), "175G"),
        (show_flops(2.5e12), "2.50 T"),
        (show_flops(0), "0"),
        (show_flops(12), "12.0"),
        (show_comparable_durations([0, 3e-6]), ["0 us", "3.00 us"]),
        (show_comparable_durations([4e-6, 0.4]), ["<0.01 ms", "400 ms"]),
        (show_comparable_durations([0.002, 0.4]), ["2.00 ms", "400 ms"]),
        (show_comparable_durations([0.9, 0.9996]), ["0.90 s", "1.00 s"]),
        (show_comparable_durations([1200, 1500]), ["20.0 min", "25.0 min"]),
        (show_comparable_durations([7200, 360_000_000]), ["2.00 h", "100000 h"]),
        (show_duration(0), "0.00 s"),
        (show_duration(42e-6), "42 us"),
        (show_duration(0.00123), "1.23 ms"),
        (show_duration(0.0252), "25.2 ms"),
        (show_duration(0.25), "0.25 s"),
        (show_duration(12.34), "12.3 s"),
        (show_duration(59.97), "1 min 00 s"),
        (show_duration(245), "4 min 05 s"),
        (show_duration(3 * 3600 + 20 * 60), "3 h 20 min"),
        (show_duration(51 * 3600), "2 d 3 h"),
        (show_duration(71.2 * 365 * 86400), "71 years"),
        (show_duration(math.inf), "unknown"),
    ],
)
def test_number_formats(shown, expected):
    assert shown == expected


def test_sparkline_follows_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([7, 0], 10) == "█▁"
    assert sparkline([1.0, 1.0, 1.0], 3) == "▁▁▁"
    assert sparkline([], 5) == ""
    assert sparkline([math.nan, 2.0, math.inf, 3.0], 5) == "▁█"
    assert sparkline(list(range(1000)), 4) == "▁▃▆█"
