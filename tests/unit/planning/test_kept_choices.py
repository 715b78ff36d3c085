"""A choice of sparse products that one run has measured is taken by the next on the same host."""

import numba
import pytest
import torch

from penstock.engine import ProductCase, SparseProducts
from penstock.planning import forget_choices, kept_choices, product_choices
from penstock.planning.kept_choices import keep_choices
from penstock.planning.program_cache.entries import folder
from penstock.sparsity import Choice, DenseTiles, SparseKernel
from penstock.telemetry import CoreUse

CASE = ProductCase((8, 4), torch.float32, 64, 0.9)
OTHERS = [
    ProductCase((8, 5), torch.float32, 64, 0.9),
    ProductCase((8, 4), torch.bfloat16, 64, 0.9),
    ProductCase((8, 4), torch.float32, 65, 0.9),
    ProductCase((8, 4), torch.float32, 64, 0.85),
]
CHOICE = Choice(SparseKernel(48, 64), DenseTiles(16), SparseKernel(32, 8, 128))


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def quiet(monkeypatch):
    """A host on which others take this share of the cores' time."""
    share = [0.0]
    monkeypatch.setattr(CoreUse, "shares_since", lambda self, before: (share[0], 0.0))
    return share


def test_choices_are_kept_until_they_are_forgotten():
    assert kept_choices.kept_choices([CASE]) == {}
    keep_choices({CASE: CHOICE}, None)
    assert kept_choices.kept_choices([CASE, *OTHERS]) == {CASE: CHOICE}
    forget_choices()
    assert kept_choices.kept_choices([CASE]) == {}
    forget_choices()


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (kept_choices, "code_digest", lambda: "other sources"),
        (kept_choices, "processor_name", lambda: "another processor"),
        (kept_choices, "cache_bytes", lambda: (1, 2)),
        (numba, "get_num_threads", lambda: 99),
        (torch, "get_num_threads", lambda: 99),
    ],
)
def test_choices_of_another_host_or_release_are_not_taken(monkeypatch, owner, name, other):
    keep_choices({CASE: CHOICE}, None)
    monkeypatch.setattr(owner, name, other)
    assert kept_choices.kept_choices([CASE]) == {}


@pytest.mark.parametrize(
    "content",
    [b"[", b'{"forward": {"way": "sparse"}}', b"[]", b"null", b"5", b"[" * 100_000],
    ids=["cut short", "incomplete", "list", "null", "number", "deep"],
)
def test_entry_that_is_no_choice_is_removed(content):
    keep_choices({CASE: CHOICE}, None)
    (path,) = folder("products").iterdir()
    kept_choices.write_entry(path.name, content, "products")
    assert kept_choices.kept_choices([CASE]) == {}
    assert not path.exists()


@pytest.mark.parametrize(("share", "is_kept"), [(0.0, True), (0.1, True), (0.2, False)])
def test_only_a_measurement_that_nobody_disturbs_is_kept(quiet, share, is_kept):
    quiet[0] = share
    measured = []

    def measure(*case):
        measured.append(case)
        return CHOICE

    for _ in range(2):
        product_choices._measure(SparseProducts(measure=measure), [CASE])
    assert len(measured) == (1 if is_kept else 2)


def test_the_record_of_a_run_counts_more_than_a_kept_choice(quiet):
    keep_choices({CASE: CHOICE}, None)
    recorded = Choice(*3 * [DenseTiles(4)])
    products = SparseProducts({CASE: recorded})
    product_choices._measure(products, [CASE])
    assert products.choice(CASE.shape, CASE.dtype, CASE.tokens, CASE.sparsity) == recorded


def test_system_that_does_not_report_its_cores_is_taken_for_quiet(monkeypatch):
    monkeypatch.setattr(CoreUse, "now", lambda: None)
    product_choices._measure(SparseProducts(measure=lambda *_: CHOICE), [CASE])
    assert kept_choices.kept_choices([CASE]) == {CASE: CHOICE}
