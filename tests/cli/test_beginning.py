"""`gpulayer init`: the first inventory."""

from __future__ import annotations

import os

import pytest

from gpulayer.spec.inventory import load_inventory
from tests.cli.command import Commander

CONFIG = """\
# Host commented
Host *.example.org !bastion
  User ml
Host mac-studio "Gpu.Box" gpu-box
  HostName 10.0.0.7
host=here
Include more/*.conf nothing-here
Host -oProxyCommand=evil
"""


def configure(gpulayer: Commander) -> None:
    folder = gpulayer.home / ".ssh" / "more"
    folder.mkdir(parents=True)
    (folder.parent / "config").write_text(CONFIG)
    (folder / "a.conf").write_text("Host deep mac-studio\nInclude other\n")
    (folder.parent / "other").write_text("Include config\nHOST\tdeeper\n")  # a circle ends


def test_the_hosts_of_the_ssh_configuration_and_this_machine_are_written(gpulayer: Commander) -> None:
    configure(gpulayer)
    made = gpulayer("init")
    assert made.code == 0
    assert "'-oProxyCommand" in made.err
    hosts = load_inventory(gpulayer.folder / "inventory.yaml").hosts
    assert {name: host.target for name, host in hosts.items() if name != "here"} == {
        "mac-studio": "mac-studio",
        "gpu-box": "Gpu.Box",
        "gpu-box-2": "gpu-box",
        "here-2": "here",
        "deep": "deep",
        "deeper": "deeper",
    }
    assert hosts["here"].transport == "local"
    assert gpulayer("validate").code == 0


def test_an_inventory_that_is_there_stays(gpulayer: Commander) -> None:
    gpulayer.write("inventory.yaml", "mine")
    refused = gpulayer("init")
    assert (refused.code, refused.out) == (2, "")
    assert "there already" in refused.err
    assert (gpulayer.folder / "inventory.yaml").read_text() == "mine"


def test_without_a_configuration_it_is_this_machine_alone(gpulayer: Commander) -> None:
    assert gpulayer("init", "--json").json() == {
        "schema": "gpulayer.init/1", "path": "inventory.yaml", "hosts": ["here"]
    }  # fmt: skip


@pytest.mark.timeout(20)  # one that waits at a pipe, or reads a device to its end, waits for ever
@pytest.mark.parametrize(("what", "words"), [("pipe", "this is a pipe"), ("device", "this is not a regular file")])
@pytest.mark.parametrize("included", [False, True])
def test_a_configuration_that_is_no_file_is_named_and_never_waited_for(
    gpulayer: Commander, what: str, words: str, *, included: bool
) -> None:
    folder = gpulayer.home / ".ssh"
    folder.mkdir(mode=0o700)
    bad = folder / ("other" if included else "config")
    if included:
        (folder / "config").write_text("Host one\nInclude other\n")
    if what == "pipe":
        os.mkfifo(bad)
    else:
        bad.symlink_to("/dev/zero")
    refused = gpulayer("init")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith(f"{bad}: {words}")
    assert not (gpulayer.folder / "inventory.yaml").exists()


def test_a_configuration_that_is_nowhere_has_no_hosts(gpulayer: Commander) -> None:
    (gpulayer.home / ".ssh").mkdir(mode=0o700)
    (gpulayer.home / ".ssh" / "config").symlink_to(os.devnull)
    assert gpulayer("init", "--json").json()["hosts"] == ["here"]
