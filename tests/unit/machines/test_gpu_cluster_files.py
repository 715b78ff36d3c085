"""Files that describe GPU clusters: the library, and what is refused."""

from __future__ import annotations

import pytest
import yaml

from penstock.errors import ConfigError
from penstock.machines import GpuCluster, known_gpu_clusters, load_gpu_cluster

NAMES = known_gpu_clusters()


def test_library_has_the_clusters_of_the_literature():
    assert NAMES == ("a100-cluster", "h100-cluster", "v100-cluster")


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_of_the_library_has_a_source(name):
    cluster = load_gpu_cluster(name)
    assert cluster.name == name
    data = cluster.model_dump(exclude_none=True)
    figures = set()
    for part in ("gpu", "node", "network"):
        for key, value in data[part].items():
            if key == "products":
                figures |= {"gpu.products.peak", "gpu.products.efficiency"}
            elif isinstance(value, dict):
                figures |= {f"{part}.{key}.{inner}" for inner in value}
            else:
                figures.add(f"{part}.{key}")
    assert set(cluster.sources) == figures
    for text in cluster.sources.values():
        assert text.split(":")[0].split()[0] in ("published", "assumed", "fitted")


def test_a_file_is_loaded_by_its_path(tmp_path):
    path = tmp_path / "mine.yaml"
    cluster = load_gpu_cluster("h100-cluster")
    path.write_text(yaml.safe_dump(cluster.model_dump(mode="json")))
    assert load_gpu_cluster(path) == cluster


def _with(tmp_path, *changes: tuple[str, str]) -> str:
    """Return the path of the A100 cluster's file with lines changed."""
    cluster = load_gpu_cluster("a100-cluster").model_dump(mode="json", exclude={"sources"})
    text = yaml.safe_dump(cluster, sort_keys=False)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return str(path)


def _problems(path: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_gpu_cluster(path)
    return [line.removeprefix(f"{path}:") for line in str(error.value).splitlines()]


def test_impossible_figures_are_refused_all_at_once(tmp_path):
    path = _with(
        tmp_path,
        ("efficiency: 0.85", "efficiency: 1.2"),
        ("peak: 312000000000000.0", "peak: 0"),
        ("gpus: 8", "gpus: 0"),
        ("peak: 25000000000.0", "peak: .nan"),
    )
    assert [line.split(": ", 1)[1] for line in _problems(path)] == [
        "gpu.memory_rate.efficiency: expected a number up to 1, got 1.2",
        "gpu.products[0].peak: expected a number from 1 up, got 0",
        "node.gpus: expected a number from 1 up, got 0",
        "network.link.peak: expected a finite number, got .nan",
    ]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            [("dtype: float32", "dtype: bfloat16")],
            "gpu.products: expected each type once, got bfloat16, bfloat16",
        ),
        (
            [("reserved: 4GiB", "reserved: 90GiB")],
            "gpu.reserved: expected less than memory (80GiB), got 90GiB",
        ),
    ],
)
def test_figures_that_contradict_each_other_are_refused(tmp_path, changes, text):
    (line,) = _problems(_with(tmp_path, *changes))
    assert line.split(": ", 1)[1] == text


def test_unknown_name_lists_the_known():
    with pytest.raises(ConfigError) as error:
        load_gpu_cluster("a100-clutser")
    assert str(error.value) == (
        "a100-clutser: expected a known GPU cluster or the path of a YAML file, got neither (did "
        "you mean 'a100-cluster'?); known are a100-cluster, h100-cluster, v100-cluster"
    )


def test_an_empty_file_names_what_is_missing(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    with pytest.raises(ConfigError) as error:
        load_gpu_cluster(path)
    assert str(error.value).splitlines() == [
        f"{path}: {key}: missing key; add it" for key in ("name", "gpu", "node", "network")
    ]


def test_numbers_keep_their_type():
    assert isinstance(load_gpu_cluster("v100-cluster"), GpuCluster)
    assert load_gpu_cluster("v100-cluster").gpu.product_flops["bfloat16"] == 0.74 * 1.25e14
