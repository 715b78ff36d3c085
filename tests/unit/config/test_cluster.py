"""What `cluster` may say, and what `Trainer(cluster=...)` stands for."""

from __future__ import annotations

import pytest

from penstock.config import Config, cluster_keys
from penstock.errors import ConfigError
from penstock.planning import relay_count


def config(**cluster):
    return Config.from_mapping({"model": "gpt2", "cluster": cluster})


@pytest.mark.parametrize(
    "address", ["auto", "10.0.0.1:6379", "head.lab:6379", "ray://head:10001", "[fe80::1]:6379"]
)
def test_ray_addresses_are_accepted(address):
    assert config(start="ray", address=address).cluster.address == address


@pytest.mark.parametrize("address", ["", "head", "http://head:80", "ray://head", "a b:1", "h:x"])
def test_invalid_address_is_refused(address):
    with pytest.raises(ConfigError, match=r"cluster\.address: expected auto, HOST:PORT, ray://"):
        config(start="ray", address=address)


@pytest.mark.parametrize("start", ["none", "local", "listen"])
def test_only_ray_takes_an_address_and_variables(start):
    for key, value in (("address", "auto"), ("environment", ["HF_HOME"])):
        with pytest.raises(ConfigError, match=rf"cluster\.{key}: .* cluster\.start: {start}"):
            config(start=start, **{key: value})


def test_invalid_variable_names_are_refused():
    with pytest.raises(ConfigError, match=r"expected names of environment variables, got 'A=1'"):
        config(start="ray", environment=["A=1"])


def test_short_forms_are_accepted():
    ray = config(start="ray", address="auto", environment=["HF_HOME"]).to_mapping()

    def told(where):
        return Config.from_mapping({**ray, **_merged(ray, cluster_keys(where))}).cluster

    assert (told("ray").start, told("ray").address) == ("ray", "auto")
    assert (told("ray://a:1").start, told("ray://a:1").address) == ("ray", "ray://a:1")
    for start in ("none", "local", "listen"):
        assert (told(start).start, told(start).address, told(start).environment) == (
            start,
            None,
            (),
        )


def test_cluster_none_holds_all_shards_in_one_process_without_replicas():
    config = Config.from_mapping(
        {
            "model": "gpt2",
            "cluster": {"start": "local", "shards": "apart"},
            "store": {"shards": 2, "replicas": 2, "dram": "1GiB"},
        }
    ).to_mapping()
    alone = Config.from_mapping({**config, **_merged(config, cluster_keys("none"))})
    assert (alone.cluster.start, alone.cluster.shards) == ("none", "here")
    assert (alone.store.shards, alone.store.replicas, int(alone.store.dram)) == (2, 1, 1 << 30)


def _merged(whole, sections):
    return {section: whole[section] | keys for section, keys in sections.items()}


def with_relays(relays, **cluster):
    return Config.from_mapping(
        {"model": "gpt2", "engines": 4, "cluster": cluster, "fabric": {"relays": relays}}
    )


@pytest.mark.parametrize("relays", [-1, 4097, 1.5, True, "2", "none", None])
def test_invalid_number_of_relays_is_refused(relays):
    with pytest.raises(
        ConfigError, match=r"fabric\.relays: expected a whole number from 0 to 4096, or auto, got"
    ):
        with_relays(relays, start="local")


def test_relays_need_processes():
    expected = (
        r"fabric\.relays: expected auto or 0 with cluster\.start: none, got 3; relays are pro"
    )
    with pytest.raises(ConfigError, match=expected):
        with_relays(3)
    assert with_relays(0).fabric.relays == 0
    assert cluster_keys("none")["fabric"] == {"relays": "auto"}


@pytest.mark.parametrize(
    ("cluster", "engines", "relays"),
    [
        ({}, 4, 0),
        ({"start": "local"}, 4, 0),
        ({"start": "listen"}, 4, 0),
        ({"start": "ray"}, 4, 0),  # on this machine
        ({"start": "ray", "address": "auto"}, 1, 0),
        ({"start": "ray", "address": "auto"}, 2, 4),
        ({"start": "ray", "address": "auto"}, 4, 6),
        ({"start": "ray", "address": "auto"}, 192, 280),
    ],
)
def test_automatic_relays_are_for_hosts_with_links(cluster, engines, relays):
    assert relay_count(with_relays("auto", **cluster), engines) == relays
    assert relay_count(with_relays(0, **cluster), engines) == 0


@pytest.mark.parametrize(("hosts", "relays"), [(None, 6), (9, 0), (10, 6), (1, 0)])
def test_automatic_relays_need_hosts_of_their_own(hosts, relays):
    config = with_relays("auto", start="ray", address="auto")
    assert relay_count(config, 4, hosts=hosts) == relays
    given = with_relays(3, start="ray", address="auto")
    assert relay_count(given, 4, hosts=hosts) == 3
