"""The command line itself: help, usage, unexpected faults."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import pytest

import gpulayer as package
from gpulayer.cli import arguments
from gpulayer.cli.main import COMMANDS
from gpulayer.errors import ExitCode
from gpulayer.spec.support import Framework
from tests.cli.command import ROOT, Commander

SLOW = ("asyncio", "asyncssh", "rich", "jsonschema", "jsonschema_rs", "yaml", "sqlite3", "importlib.metadata")


def parsers() -> dict[str, argparse.ArgumentParser]:
    parser = arguments._parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("plan", "--help")])
def test_help_imports_nothing_slow(words: tuple[str, ...]) -> None:
    program = (
        "import sys\nfrom gpulayer.cli.main import main\n"
        f"try:\n    main({list(words)!r})\nexcept SystemExit:\n    pass\n"
        f"print('slow:', sorted(set({SLOW!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("slow: []\n")


def test_a_fleet_of_local_hosts_never_loads_asyncssh() -> None:
    program = "import sys, gpulayer.cli.running, gpulayer.cli.afterwards; print('asyncssh' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_asyncssh_is_imported_without_starting_a_compiler() -> None:
    program = (
        "import ctypes.util, sys\nfind, started = ctypes.util.find_library, []\n"
        "sys.addaudithook(lambda event, words: event == 'subprocess.Popen' and started.append(words[0]))\n"
        "import gpulayer.fleet.ssh\n"
        "print('asyncssh' in sys.modules, started, ctypes.util.find_library is find)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True [] True\n"


def test_version_is_one_line(gpulayer: Commander) -> None:
    assert gpulayer("--version").out == f"gpulayer {package.__version__}\n"


def test_every_command_has_a_function_and_every_option_an_explanation() -> None:
    assert set(parsers()) == set(COMMANDS)
    unexplained = [
        f"{name} {action.dest}" for name, parser in parsers().items() for action in parser._actions if not action.help
    ]
    assert not unexplained
    assert all("example:\n  gpulayer " in (parser.epilog or "") for parser in parsers().values())


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    helps = [arguments._parser().format_help(), *(parser.format_help() for parser in parsers().values())]
    assert [line for text in helps for line in text.splitlines() if len(line) > 80] == []
    assert [line for text in helps for line in text.splitlines() if line.endswith("-")] == []


def test_an_unknown_option_is_answered_with_its_commands_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments.parse(["plan", "--retry"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("usage: gpulayer plan ")
    assert shown.endswith("gpulayer plan: error: unrecognized arguments: --retry\n")


def test_an_unknown_option_moves_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments.parse(["plan", "--a\x1b]0;pwn\x07\u202e"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: '--a\\x1b]0;pwn\\x07\\u202e'\n")


def test_help_knows_every_exit_code() -> None:
    codes = {int(code) for code in re.findall(r"(?:^|  )(\d+) ", arguments.EPILOG, re.MULTILINE)}
    assert codes == set(ExitCode)


def test_words_of_the_grammar_are_those_of_their_owners() -> None:
    assert set(arguments.FRAMEWORKS) == set(Framework)
    assert {f"{name}.schema.json" for name in arguments.SCHEMAS} == {
        path.name for path in (ROOT / "schemas").glob("*.schema.json")
    }


@pytest.mark.parametrize(
    "words", [("nonsense",), ("plan", "--frsh"), ("logs",), ("schema", "none"), ("plan", "a", "b")]
)
def test_wrong_usage_is_exit_code_2_and_nothing_on_stdout(gpulayer: Commander, words: tuple[str, ...]) -> None:
    result = gpulayer(*words)
    assert (result.code, result.out) == (2, "")
    assert "usage: gpulayer" in result.err


def test_no_command_shows_the_help(gpulayer: Commander) -> None:
    result = gpulayer()
    assert result.code == 0
    assert "exit codes:" in result.out


def test_a_fault_of_ours_is_one_message_and_a_traceback_only_on_request(gpulayer: Commander) -> None:
    gpulayer.write(
        "gpulayer_fault.py", "import gpulayer.spec.support as s\ndef m(): raise RuntimeError('boom')\ns.matrix = m\n"
    )
    program = "import gpulayer_fault, sys; from gpulayer.cli.main import main; sys.exit(main(['matrix']))"

    def run(**extra: str) -> subprocess.CompletedProcess[str]:
        environment = {**gpulayer.environment, **extra}
        return subprocess.run(
            [sys.executable, "-c", program],
            cwd=gpulayer.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    plain = run()
    assert plain.returncode == ExitCode.INTERNAL
    assert "RuntimeError: boom" in plain.stderr
    assert "GPULAYER_DEBUG=1" in plain.stderr
    assert "Traceback" not in plain.stderr
    assert "Traceback" in run(GPULAYER_DEBUG="1").stderr
