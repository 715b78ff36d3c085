"""Core parameters: their sources, their limits, and the files that hold them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from penstock.errors import ConfigError
from penstock.wafer import (
    SILICON,
    SIM,
    CoreParameters,
    Mesh,
    dump_parameters,
    known_parameters,
    load_parameters,
)
from penstock.wafer.parameters import figure_fields


def _text(call, *arguments, **keywords) -> str:
    with pytest.raises(ConfigError) as error:
        call(*arguments, **keywords)
    return str(error.value)


@pytest.mark.parametrize("parameters", [SIM, SILICON], ids=lambda item: item.name)
def test_every_figure_of_a_named_set_has_a_source(parameters):
    assert set(parameters.sources) == set(figure_fields())
    for text in parameters.sources.values():
        assert text.split(":")[0] in ("published", "third party", "derived", "fitted", "assumed")


def test_operation_on_4096_elements_takes_1040_cycles():
    assert SIM.alone_cycles(4096) == 1040


def test_elements_are_rounded_up_to_the_vector_width():
    core = CoreParameters("x", half_group_cycles=1.5, float_group_cycles=2.0)
    assert [core.elements_cycles(count) for count in (0, 1, 4, 5)] == [0, 1.5, 1.5, 3.0]
    assert core.elements_cycles(5, element_bytes=4) == 10.0


def test_dot_product_is_never_faster_than_other_operations():
    assert SIM.dot_cycles(8) == SIM.elements_cycles(8) == 2
    assert SIM.dot_cycles(8, 4) == SIM.elements_cycles(8, 4) == 10
    assert SILICON.dot_cycles(8) == SILICON.dot_cycles(8, 4) == 16  # 2 cycles per element


def test_words_of_the_host_link_follow_from_bits_and_clock():
    assert SIM.host_words_per_cycle == pytest.approx(1.2e12 / 32 / 1.1e9)  # 34, as derived by hand


def test_mesh_without_cores_is_refused():
    assert _text(Mesh, 0, 8) == (
        "mesh: expected rows from 1 up, got 0; a CS-2 has 750 rows and 994 columns, for example "
        "mesh: 750x994"
    )
    assert _text(Mesh, 8, -1).startswith("mesh: expected columns from 1 up, got -1;")
    assert _text(Mesh, 8, True).startswith("mesh: expected columns from 1 up, got True;")


def test_mesh_of_too_many_cores_is_refused():
    assert _text(Mesh, 100_000, 1000) == (
        "mesh: expected at most 10,000,000 cores, got 100000 x 1000 = 100,000,000; a CS-2 has "
        "750 x 994"
    )


def test_mesh_is_read_from_text():
    assert Mesh.parse("750x994") == Mesh(750, 994)
    assert str(Mesh.parse(" 2 X 3 ")) == "2x3"
    assert _text(Mesh.parse, "32") == (
        "mesh: expected rows and columns such as 32x32, got '32'; a CS-2 has 750x994"
    )
    assert _text(Mesh.parse, "0x5").startswith("mesh: expected rows from 1 up, got 0;")


def test_impossible_values_are_refused_all_at_once():
    text = _text(
        CoreParameters,
        "x",
        clock_hz=0,
        simd_half=0,
        simd_float=1.0,
        word_cycles=0.5,
        queue_words=0,
        hop_cycles=float("nan"),
        task_cycles=-1,
        threads_share_data_path=1,
    )
    assert text.splitlines() == [
        "clock_hz: expected a number above 0 (Hz), got 0",
        "simd_half: expected a whole number from 1 up (multiply-adds per cycle), got 0",
        "simd_float: expected a whole number from 1 up (multiply-adds per cycle), got 1.0",
        "task_cycles: expected a number from 0 up (cycles), got -1",
        "hop_cycles: expected a number above 0 (cycles), got nan",
        "word_cycles: expected a number from 1 up (cycles), got 0.5",
        "queue_words: expected a whole number from 1 up (words), got 0",
        "threads_share_data_path: expected true or false, got 1",
    ]


def test_program_as_large_as_the_memory_is_refused():
    assert _text(CoreParameters, "x", sram_bytes=4096, reserved_bytes=4096) == (
        "reserved_bytes: expected less than sram_bytes (4096), got 4096; data needs memory too"
    )


def test_named_sets_are_loaded_by_name():
    assert known_parameters() == ["sim", "silicon"]
    assert load_parameters("sim") is SIM
    assert load_parameters("silicon") is SILICON
    assert _text(load_parameters, "silicn") == (
        "expected core parameters, sim or silicon, or the path of a file that ends in .yaml, got "
        "'silicn' (did you mean 'silicon'?)"
    )


@pytest.mark.parametrize("parameters", [SIM, SILICON], ids=lambda item: item.name)
def test_dumped_set_is_read_back_as_equal(parameters, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(dump_parameters(parameters))
    again = load_parameters(path)
    assert again == parameters
    assert again.sources == parameters.sources


def test_file_gives_what_differs_from_its_base(tmp_path):
    path = tmp_path / "slow.yaml"
    path.write_text('base: silicon\nclock_hz: 0.85e9\nsources: {clock_hz: "published: the SDK"}\n')
    slow = load_parameters(str(path))
    assert slow == dataclasses.replace(SILICON, name="slow", clock_hz=0.85e9)
    assert slow.sources["clock_hz"] == "published: the SDK"
    assert slow.sources["hop_cycles"] == SILICON.sources["hop_cycles"]


def test_replaced_figure_loses_its_source(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nhop_cycles: 3\n")
    assert "hop_cycles" not in load_parameters(path).sources


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "name: mine\nhop_cycle: 2\n",
            [":2: hop_cycle: unknown key (did you mean 'hop_cycles'?)"],
        ),
        ("speed: 2\n", [":1: speed: unknown key; core parameters have name, base, clock_hz, "]),
        ("base: wse\n", [":1: base: expected sim or silicon, got 'wse'"]),
        ("name: 3\n", [":1: name: expected a text, got 3; name the set"]),
        (
            "name: mine\nsources: {hop_cycles: 2}\n",
            [":2: sources: expected a text for each figure, such as {clock_hz: "],
        ),
        (
            'name: mine\nsources: {hops: "assumed: x"}\n',
            [":2: sources: expected names of figures, got hops; remove them"],
        ),
        (
            "simd_half: 0\n\nclock_hz: .inf\n",
            [
                ":3: clock_hz: expected a number above 0 (Hz), got inf",
                ":1: simd_half: expected a whole number from 1 up (multiply-adds per cycle), got 0",
            ],
        ),
        ("", [": expected core parameters, got an empty file; give sim or silicon, or a file"]),
        ("- 1\n", [":1: expected keys and values such as `name: mine`, got [1]"]),
    ],
)
def test_impossible_files_are_refused_with_their_lines(text, problems, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    lines = _text(load_parameters, path).splitlines()
    assert len(lines) == len(problems)
    for line, problem in zip(lines, problems, strict=True):
        assert line.startswith(f"{path}{problem}")


def test_missing_file_is_named(tmp_path):
    path = tmp_path / "none.yaml"
    assert _text(load_parameters, path) == (
        f"{path}: no such file; give sim or silicon, or a file such as "
        "{name: mine, base: silicon}"
    )


def test_package_is_imported_without_a_compiler_or_torch():
    script = (
        "import sys; import penstock.wafer as w, penstock.wafer.closed_form; w.SIM; "
        "sys.exit(','.join({'torch', 'numba', 'numpy', 'pydantic'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
