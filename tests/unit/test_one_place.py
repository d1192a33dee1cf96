"""Reading what hosts send, writing to a terminal, and the remote command have one place each."""

from __future__ import annotations

import ast

from tests.unit.test_house import MODULES, parse, under

CONTROLLER = ("fleet", "run", "cli", "placement", "__main__", "errors")
OURS = {"run.store", "fleet.tree"}  # they read again what we have written: the database, the cache of hashes


def uses(*wanted: str) -> set[str]:
    """The modules of the controller in which a dotted name is used, or a builtin is called."""
    return {
        name
        for name, path in MODULES.items()
        if under(name, CONTROLLER)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in wanted
    }


def test_json_of_hosts_is_read_by_the_reader_of_frames_alone() -> None:
    assert uses("json.loads", "json.load", "json.JSONDecoder") == OURS


def test_the_screen_alone_writes_what_others_wrote() -> None:
    # The command's entry writes the version, and looks after streams that are closed.
    assert uses("sys.stdout", "sys.stderr", "print") == {"cli.screen", "cli.main"}


def test_a_host_is_given_the_constant_command_and_nothing_else() -> None:
    given = {
        name: ast.unparse(node.args[1])
        for name, path in MODULES.items()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".create_session", ".create_process"))
    }
    assert given == {"fleet.ssh": "REMOTE_COMMAND"}
    assert uses("start_process") == {"fleet.process", "fleet.openssh"}
    assert uses("REMOTE_COMMAND") == {"fleet.ssh", "fleet.process", "fleet.openssh", "fleet.shipment"}
