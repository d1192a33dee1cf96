"""The few kinds of errors that GPUlayer raises, and the exit code that each ends a command with.

Every error says what is wrong, where (file:line:column, or host and stage) and what to do about it (`fix`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

MOST_TOLD = 2000
"""Characters that are kept of what a host, a server or a program of others says."""


def told(text: str) -> str:
    """Return what others said as it may stand in messages and records: not too long, and encodable as UTF-8."""
    kept = text if len(text) <= MOST_TOLD else f"{text[: MOST_TOLD - 1]}\N{HORIZONTAL ELLIPSIS}"
    return kept.encode(errors="backslashreplace").decode()


class ExitCode(enum.IntEnum):
    """Exit codes of the command line. Where several hold, the first of 2, 5, 4, 3, 1 applies.

    INTERNAL is a fault in GPUlayer itself (EX_SOFTWARE of sysexits.h), so that it is never taken for a job's failure.
    """

    OK = 0
    JOB_FAILED = 1
    INVALID = 2
    REFUSED = 3
    UNREACHABLE = 4
    STALE = 5
    DECLINED = 6
    INTERNAL = 70
    INTERRUPTED = 130


class Stage(enum.StrEnum):
    """Where on the way to a host something went wrong, in the order in which they are passed."""

    RESOLVE = "resolve"
    CONNECT = "connect"
    HOST_KEY = "host key"
    AUTHENTICATE = "authenticate"
    SHELL = "shell"
    PYTHON = "python"
    PROTOCOL = "protocol"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong in a document. Lines and columns count from 1; 0 means the file as a whole."""

    path: str
    line: int
    column: int
    field: str
    message: str
    source: str | None = None

    def __str__(self) -> str:
        """Return the form that editors know, then the offending line with a caret."""
        where = f"{self.path}:{self.line}:{self.column}: " if self.line else f"{self.path}: "
        head = f"{where}{self.field}: {self.message}" if self.field else f"{where}{self.message}"
        if self.source is None or not self.line:
            return head
        return f"{head}\n    {self.source}\n    {' ' * (self.column - 1)}^"


class GpulayerError(Exception):
    """Base of all errors that a user is meant to read. `fix` says what to do."""

    exit_code: ClassVar[ExitCode] = ExitCode.INVALID

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        """Keep the sentence and the advice apart, so that each surface can lay them out."""
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        """Return the sentence, followed by the advice where there is one."""
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class UsageError(GpulayerError):
    """The command or the call was wrong (exit 2)."""


class StateError(GpulayerError):
    """The local `.gpulayer` folder or its database cannot be used (exit 2)."""


class InvalidDocumentError(GpulayerError):
    """A document does not hold; carries all of its problems at once (exit 2)."""

    def __init__(self, problems: list[Problem]) -> None:
        """`problems` is not empty and is in the order of the file."""
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class HostError(GpulayerError):
    """A host cannot be reached or does not answer as it must (exit 4); says at which stage."""

    exit_code = ExitCode.UNREACHABLE

    def __init__(self, host: str, stage: Stage, message: str, *, fix: str | None = None) -> None:
        """`message` is one sentence without the host's name; of one that quotes too much of others the end is cut."""
        self.host = host
        self.stage = stage
        self.reason = told(message)
        super().__init__(f"{host}: {stage.value}: {self.reason}", fix=fix)


class StalePlanError(GpulayerError):
    """What a plan stands on has changed since it was made (exit 5)."""

    exit_code = ExitCode.STALE


class DeclinedError(GpulayerError):
    """The question was answered with no (exit 6)."""

    exit_code = ExitCode.DECLINED
