from __future__ import annotations

from pathlib import Path

import pytest

from gpulayer.errors import InvalidDocumentError
from gpulayer.spec.documents import parse
from gpulayer.spec.inventory import (
    Expectation,
    Host,
    Inventory,
    TransportKind,
    load_inventory,
    local_inventory,
    parse_inventory,
)

VALID = Path(__file__).parents[1] / "documents" / "valid"


def read(text: str) -> Inventory:
    return parse_inventory(parse(text.encode(), "inventory.yaml"))


def test_every_key_arrives() -> None:
    inventory = load_inventory(VALID / "inventory-every-key.yaml")
    assert list(inventory.hosts) == ["mac-studio", "bastion", "old", "here", "plain"]
    assert inventory.hosts["mac-studio"] == Host(
        name="mac-studio",
        address="mac-studio.local",
        port=22,
        user="ml",
        identity_file="~/.ssh/id_ed25519",
        jump="bastion",
        host_key="SHA256:uNiVztksCsDhcc0u9e8BrrJXVGDMIYuY4gUNHK3Z1nI",
        python="~/venvs/torch/bin/python",
        labels={"fleet": "home", "site": "desk"},
        expect=Expectation(accelerator="mps", count=1),
        private_address="10.0.0.5",
        max_jobs=4,
        drain=False,
        state_dir="~/.local/state/gpulayer",
        lease_dir="/run/lock/gpulayer",
    )


def test_defaults_reach_every_host_and_null_takes_them_away() -> None:
    hosts = load_inventory(VALID / "inventory-every-key.yaml").hosts
    assert (hosts["plain"].user, hosts["plain"].jump, hosts["plain"].target) == ("ml", "bastion", "plain")
    assert (hosts["bastion"].jump, hosts["bastion"].target) == (None, "2001:db8::1")
    assert (hosts["old"].transport, hosts["old"].jump) == (TransportKind.OPENSSH, "an-alias")


def test_defaults_of_a_connection_do_not_reach_a_local_host() -> None:
    here = load_inventory(VALID / "inventory-every-key.yaml").hosts["here"]
    assert here == Host(name="here", transport=TransportKind.LOCAL, labels={"fleet": "home"}, max_jobs=2)


def test_without_an_inventory_this_machine_is_one() -> None:
    assert local_inventory() == Inventory(hosts={"local": Host(name="local", transport=TransportKind.LOCAL)})


def test_a_default_transport_makes_hosts_local() -> None:
    hosts = read("version: 1\ndefaults: {transport: local}\nhosts: {a: , b: {transport: ssh, user: x}}\n").hosts
    assert [host.transport for host in hosts.values()] == [TransportKind.LOCAL, TransportKind.SSH]


@pytest.mark.parametrize(
    ("hosts", "places"),
    [
        ("{a: {jump: a}}", [(2, 19, "a -> a")]),
        ("{a: {jump: b}, b: {jump: a}}", [(2, 19, "a -> b -> a"), (2, 33, "b -> a -> b")]),
        ("{a: {jump: b}, b: {jump: alias}}", []),
        ("{a: {jump: b}, b: {transport: local}}", [(2, 19, "this machine")]),
        ("{a: {transport: local, address: x}}", [(2, 40, "take this key out")]),
    ],
)
def test_the_way_to_a_host_ends(hosts: str, places: list[tuple[int, int, str]]) -> None:
    text = f"version: 1\nhosts: {hosts}\n"
    if not places:
        assert len(read(text).hosts) == 2
        return
    with pytest.raises(InvalidDocumentError) as caught:
        read(text)
    for problem, (line, column, words) in zip(caught.value.problems, places, strict=True):
        assert (problem.line, problem.column + 0) == (line, column)
        assert words in problem.message


def test_a_circle_of_defaults_is_told_at_the_default() -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        read("version: 1\ndefaults: {jump: bastion}\nhosts: {bastion: }\n")
    (problem,) = caught.value.problems
    assert (problem.line, problem.column, problem.field) == (2, 18, "defaults.jump")


def test_a_pin_and_openssh_contradict_each_other() -> None:
    pin = "SHA256:uNiVztksCsDhcc0u9e8BrrJXVGDMIYuY4gUNHK3Z1nI"
    with pytest.raises(InvalidDocumentError, match="cannot be given a pin"):
        read(f"version: 1\nhosts: {{a: {{transport: openssh, host_key: '{pin}'}}}}\n")
    assert read(f"version: 1\nhosts: {{a: {{host_key: '{pin}'}}}}\n").hosts["a"].host_key == pin
