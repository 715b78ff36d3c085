"""The device of a folder, by the system's table of mounts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.calibration import disk_device
from penstock.calibration.disk_device import device_of

TABLE = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime - ext4 /dev/nvme0n1p2 rw
40 27 8:1 / @slow rw,relatime shared:1 master:7 - xfs /dev/sda1 rw
41 40 0:50 / @slow/other\040disk rw - nfs4 server:/export rw
42 27 8:1 /data @bound rw - xfs /dev/sda1 rw
43 27 0:60 / @hidden rw - tmpfs tmpfs rw
44 27 8:17 / @hidden rw - ext4 /dev/sdb1 rw
"""


@pytest.fixture
def mounts(tmp_path, monkeypatch) -> Path:
    """Folders that a table of mounts names."""
    for name in ("slow/inner", "slow/other disk", "slower", "bound", "hidden"):
        (tmp_path / name).mkdir(parents=True)
    table = tmp_path / "mountinfo"
    table.write_text(TABLE.strip().replace("@", f"{tmp_path}/"))
    monkeypatch.setattr(disk_device, "_MOUNTS", table)
    monkeypatch.setattr(disk_device, "_IDENTIFIERS", tmp_path / "no identifiers")
    return tmp_path


def test_device_of_a_folder_is_the_source_of_its_mount(mounts):
    for folder, device in (
        ("slow", "/dev/sda1"),
        ("slow/inner", "/dev/sda1"),
        ("slower", "/dev/nvme0n1p2"),  # a name that begins like that of a mount
        ("slow/other disk", f"server:/export at {mounts}/slow/other disk"),
        ("bound", "/dev/sda1"),
        ("hidden", "/dev/sdb1"),  # the later mount
    ):
        assert device_of(mounts / folder) == device, folder


def test_device_of_a_link_to_a_folder_is_that_of_the_folder(mounts):
    (mounts / "link").symlink_to(mounts / "slow")
    assert device_of(mounts / "link") == "/dev/sda1"


def test_file_system_with_an_identifier_has_it_whatever_the_number_of_its_device(
    mounts, monkeypatch
):
    identifiers = mounts / "by-uuid"
    identifiers.mkdir()
    (identifiers / "1111-aaaa").touch()
    (identifiers / "2222-bbbb").touch()
    monkeypatch.setattr(disk_device, "_IDENTIFIERS", identifiers)
    found = os.stat

    def stat(path, *args, **more):
        numbers = {"/dev/sda1": 7, "1111-aaaa": 5, "2222-bbbb": 7}
        number = numbers.get(str(path)) or numbers.get(Path(path).name)
        return SimpleNamespace(st_rdev=number) if number else found(path, *args, **more)

    monkeypatch.setattr(disk_device.os, "stat", stat)
    assert device_of(mounts / "slow") == "file system 2222-bbbb"


def test_without_a_table_of_mounts_the_device_number_is_the_name(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_device, "_MOUNTS", tmp_path / "none")
    number = os.stat(tmp_path).st_dev
    assert device_of(tmp_path) == f"device {os.major(number)}:{os.minor(number)}"


def test_device_of_a_folder_on_this_host_has_a_name(tmp_path):
    assert device_of(tmp_path) == device_of(tmp_path) != ""
