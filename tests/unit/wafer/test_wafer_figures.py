"""Pictures of the wafer: every name draws, and every picture says what its numbers are."""

from __future__ import annotations

import pytest
from grids import quick_first

from penstock.pictures import empty_figure
from penstock.wafer import SIM, Mesh
from penstock.wafer.mesh import TraceOptions
from penstock.wafer_figures import FIGURES, draw, figure_named, simulated_case as cases
from penstock.wafer_figures.drawn_masks import drawn_mask
from penstock.wafer_figures.sorting import over_even

SMALL = {"mesh": Mesh(4, 4), "outputs": 24, "inputs": 24, "tokens": 16}


@pytest.fixture
def small(monkeypatch):
    """Let the pictures of the simulator show a small product."""

    def small_case(**more):
        return cases.Case(**{**more, **SMALL})

    for name in ("cores", "links", "queues", "moving"):
        monkeypatch.setattr(f"penstock.wafer_figures.{name}.Case", small_case)
    few = TraceOptions(windows=2, cycles=20)
    monkeypatch.setattr("penstock.wafer_figures.moving._TRACE", few)


@pytest.fixture
def titles(monkeypatch):
    """Return the texts that are above a picture once it is drawn."""
    found = []

    def noted(width=7.0, height=4.2):
        figure = empty_figure(width, height)
        found.append(figure)
        return figure

    for module in ("pictures", "wafer_figures.heat_maps", "wafer_figures.moving"):
        monkeypatch.setattr(f"penstock.{module}.empty_figure", noted)

    def texts():
        figure = found[-1]
        return [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]

    return texts


@pytest.mark.parametrize(
    "name",
    quick_first(
        ["ring", "accumulators", "queues", "cores", "links", "animation"], ["ring", "animation"]
    ),
)
def test_every_picture_says_whether_it_is_simulated_or_closed_form(name, small, titles, tmp_path):
    path = tmp_path / f"picture{FIGURES[name].endings[-1]}"
    draw(name, path, SIM)
    first = next(text for text in titles() if text)
    assert first.startswith(f"{FIGURES[name].source.capitalize()} (sim cores)")
    assert path.stat().st_size > 2000


@pytest.mark.long
@pytest.mark.parametrize("name", FIGURES)
def test_every_picture_is_drawn_as_the_docs_have_it(name, titles, tmp_path):
    path = tmp_path / f"picture{FIGURES[name].endings[-1]}"
    draw(name, path, SIM)
    first = next(text for text in titles() if text)
    assert first.startswith(f"{FIGURES[name].source.capitalize()} (sim cores)")


def test_names_have_a_description_and_a_source():
    for name, figure in FIGURES.items():
        assert figure is figure_named(name)
        assert figure.source in ("closed form", "simulated")
        assert figure.about


def test_sorting_helps_where_features_differ():
    same, differing = (drawn_mask((256, 256), 0.9, spread) for spread in (0.0, 0.5))
    assert same.mean() == pytest.approx(0.1, abs=0.01)
    assert differing.mean() == pytest.approx(0.1, abs=0.02)
    assert differing.sum(axis=0).std() > 2 * same.sum(axis=0).std()
    mesh = Mesh(8, 8)
    before, after = (over_even(differing, SIM, is_sorted=s, mesh=mesh) for s in (False, True))
    assert before > 1.02 * after


def test_simulated_case_is_the_same_on_any_run():
    case = cases.Case(**SMALL)
    for product in cases.PRODUCTS:
        first, second = (case.simulate(product, SIM).cycles for _ in range(2))
        assert first == second > 0
