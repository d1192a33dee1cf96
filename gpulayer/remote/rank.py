"""The parent of one rank: gives it a log of its own and tells its supervisor at once how it ends.

A program by itself: the supervisor writes it into the folder of its run, and torchrun starts it, once a rank, with the
agent's interpreter. Torchrun starts each rank as a session and signals its process group. The command therefore gets
another session, and what torchrun sends ends here: the supervisor, which knows the job's grace, is the only one who
signals the command, once.
"""

from __future__ import annotations

import os
import signal
import sys

FIFO = "ranks"
"""The name, in the run's folder, of the FIFO on which the supervisor listens."""

_NOT_STARTED = 127
_KILLED = 128  # the shells' way to say by which signal a command ended
_MAX_REASON = 400  # bytes as JSON: with all else less than what a FIFO takes at once (PIPE_BUF is 512 on macOS)
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def log_name(rank: int) -> str:
    """Return the name of a rank's log in the run's folder."""
    return f"rank-{rank}.log"


def main(folder: str, command: list[str]) -> int:
    """Run `command` as the rank that the environment names; return the status to exit with."""
    rank = int(os.environ["RANK"])
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    log = os.open(os.path.join(folder, log_name(rank)), flags, 0o600)
    failure, failing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for number in (*_IGNORED, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.execvp(command[0], command)  # noqa: S606  # the user's own command, word by word
        except OSError as error:
            where = "" if "/" in command[0] else " on PATH"
            missing = isinstance(error, FileNotFoundError) and not os.path.exists(command[0])
            why = f"command not found: {command[0]}{where}" if missing else f"{command[0]}: {error.strerror}"
            os.write(failing, os.fsencode(why))
        except ValueError as error:  # of a command that no system would take
            os.write(failing, os.fsencode(f"{command[0]!r} cannot be executed: {error}"))
        finally:
            os._exit(_NOT_STARTED)
    os.close(failing)
    _tell(folder, {"rank": rank, "pid": pid})
    reason = os.read(failure, 4096).decode("utf-8", "replace")
    status = os.waitpid(pid, 0)[1]
    code = None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    killer = os.WTERMSIG(status) if code is None else None
    _tell(folder, {"rank": rank, "code": code, "signal": killer, "reason": reason or None})
    return _KILLED + os.WTERMSIG(status) if code is None else code


def _tell(folder: str, message: dict[str, int | str | None]) -> None:
    """Tell the supervisor, in one write that nothing can come between. Where it is dead nobody is told."""
    line = "{" + ", ".join(f'"{name}": {_json(value)}' for name, value in message.items()) + "}\n"
    try:
        fifo = os.open(os.path.join(folder, FIFO), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.write(fifo, line.encode("utf-8", "replace"))
        os.close(fifo)
    except OSError:
        pass


def _json(value: int | str | None) -> str:
    """Return a value as JSON. Only a text, which is rare, is worth the import: it takes as long as our whole start."""
    if value is None or isinstance(value, int):
        return "null" if value is None else str(value)
    import json

    text = value[:_MAX_REASON]
    while len((line := json.dumps(text, ensure_ascii=False)).encode()) > _MAX_REASON:
        text = text[:-1]
    return line


if __name__ == "__main__":
    sys.exit(main(os.path.dirname(os.path.abspath(__file__)), sys.argv[1:]))
