"""How many pages engines may keep beside all other memory of their process."""

from dataclasses import replace

import pytest

from penstock.engine import HostMemory
from penstock.planning import keep_pages, kept_pages, settle_pages
from penstock.planning.memory_shares import MemoryShares
from penstock.telemetry import process_memory

MIB = 1 << 20
SHARES = MemoryShares(
    engine=300,
    engine_peak=100,
    engine_host=100,
    engines=200,
    store=50,
    engine_most=175,
    inference=300,
    limit=1010,
    mask_change=10,
)


@pytest.fixture
def settings(monkeypatch):
    """What the C library is told."""
    told = []
    monkeypatch.setattr(kept_pages, "untouched_bytes", lambda: 0)
    monkeypatch.setattr(kept_pages, "keep_freed_pages", lambda *given: note(given))
    monkeypatch.setattr(kept_pages, "map_tensors", lambda: note("mapped"))

    def note(what):
        told.append(what)
        return len(told)

    return told


def test_room_follows_the_resident_memory_of_the_process(settings, monkeypatch):
    keep_pages(1000 * MIB)
    ((read,),) = settings
    for resident in (700, 1100):
        monkeypatch.setattr(process_memory, "resident_bytes", lambda now=resident: now * MIB)
        assert read() == HostMemory(resident * MIB, (1000 - resident) * MIB)


def test_memory_that_the_store_has_not_touched_yet_is_no_room(settings, monkeypatch):
    now, untouched = [10.0], [300 * MIB]

    def count() -> int:
        now[0] += 0.25  # takes so many seconds
        return untouched[0]

    monkeypatch.setattr(kept_pages, "untouched_bytes", count)
    monkeypatch.setattr(kept_pages.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: 600 * MIB)
    keep_pages(1000 * MIB)
    ((read,),) = settings
    assert read().room == 100 * MIB
    untouched[0] = 0
    now[0] += 24.9
    assert read().room == 100 * MIB  # reading again would take more than a hundredth of the time
    now[0] += 0.2
    assert read().room == 400 * MIB


@pytest.mark.parametrize(("most", "expected"), [(175, ()), (174, "mapped")])
def test_engines_that_compute_at_once_keep_pages_only_if_all_fit(settings, most, expected):
    assert settle_pages(replace(SHARES, engine_most=most), are_at_once=True) == 1
    assert settings == [expected]


def test_engines_that_take_turns_keep_pages_within_the_limit(settings, monkeypatch):
    settle_pages(replace(SHARES, engine_most=100), are_at_once=False)
    ((read,),) = settings
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: 700)
    assert read().room == 1010 - 10 - 700
