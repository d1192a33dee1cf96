"""Why a command that was started on a host did not become our agent: what a login shell and its start files can do."""

from __future__ import annotations

from dataclasses import dataclass

from gpulayer.errors import HostError, Stage
from gpulayer.fleet.shipment import FIRST_LINE, NO_PYTHON

_REPLACED_SHELL = 97
_DAMAGED_PAYLOAD = 99
_SHOWN = 2048


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What was seen of a start: output before the first frame, diagnostics, and how it ended (`status`)."""

    output: bytes = b""
    stderr: bytes = b""
    status: int | None = None

    @property
    def text(self) -> str:
        """All that was said, escaped and short, for messages."""
        said = (self.output[:_SHOWN] + b"\n" + self.stderr[-_SHOWN:]).decode(errors="replace").split()
        return " ".join(said).encode("unicode_escape").decode()[:400]


def no_agent(host: str, seen: Evidence, how: str) -> HostError:
    """Return the error for a start that gave no answer. `how` says how the wait ended."""
    if NO_PYTHON in seen.output:
        return _no_python(host, seen)
    both = seen.output + seen.stderr
    if seen.status == _REPLACED_SHELL or seen.stderr.lstrip().startswith(b"fish:"):
        return HostError(
            host,
            Stage.SHELL,
            "a start file of the shell puts another shell in its place",
            fix="let it do so for terminals only, e.g. `[ -t 0 ] && exec fish` (.bashrc, .zshenv, .tcshrc there)",
        )
    if (
        seen.status == _DAMAGED_PAYLOAD
        or FIRST_LINE.strip() in seen.output
        or (b"ValueError" in seen.stderr and b"<shipped" not in seen.stderr)  # the loader's, not the agent's
    ):
        return HostError(
            host,
            Stage.SHELL,
            "a start file of the shell reads the standard input, which is ours",
            fix="give its command `</dev/null`, or run it for terminals only (.bashrc, .zshenv, .tcshrc there)",
        )
    if b"is not recognized as an internal or external command" in both or b"CommandNotFoundException" in both:
        return HostError(
            host,
            Stage.SHELL,
            "this is Windows, which is not supported",
            fix="reach the SSH server of a WSL distribution on it",
        )
    said = f"; it says: {seen.text}" if seen.text else ""
    if b"Traceback" in seen.stderr:
        return HostError(host, Stage.PYTHON, f"the agent failed ({how}){said}", fix="please report this as a bug")
    return HostError(
        host,
        Stage.SHELL,
        f"logged in, but the agent does not answer ({how}){said}",
        fix="does `ssh HOST echo hello` work? Look at the shell's start files, at forced commands and at nologin",
    )


def _no_python(host: str, seen: Evidence) -> HostError:
    words = seen.output.split(NO_PYTHON, 1)[1].split(b"\n", 1)[0].decode(errors="replace").split()
    stub = words[:1] == ["stub"]
    old = words[1:] if stub else words
    fix = "install Python 3.9 or newer there, or set `python` in the inventory to the path of one"
    if old:
        return HostError(host, Stage.PYTHON, f"no Python >= 3.9, only older: {', '.join(old)}"[:500], fix=fix)
    if stub:
        return HostError(
            host,
            Stage.PYTHON,
            "the only python3 is macOS's placeholder, which opens an installer",
            fix=f"run xcode-select --install there; or {fix}",
        )
    return HostError(host, Stage.PYTHON, "no python3 is found", fix=fix)
