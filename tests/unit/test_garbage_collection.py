"""What runs without the garbage collector leaves it as it was."""

import gc

import pytest

from penstock.garbage_collection import collection_disabled


@pytest.fixture(autouse=True)
def _collector():
    """Give the suite's collector back as it was: enabled or not, and with the objects it had."""
    was_enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_paused_during_imports_and_then_as_before(enabled):
    (gc.enable if enabled else gc.disable)()
    with collection_disabled(freeze=True):
        assert not gc.isenabled()
    assert gc.isenabled() is enabled


def test_collector_is_as_before_when_an_import_fails():
    gc.enable()
    with pytest.raises(ModuleNotFoundError), collection_disabled(freeze=True):
        import penstock.absent  # noqa: F401
    assert gc.isenabled()


def test_imported_objects_are_excluded_from_later_collections():
    gc.unfreeze()
    with collection_disabled(freeze=True):
        pass
    assert gc.get_freeze_count() > 0
