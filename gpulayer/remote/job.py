"""The leader of a job: a child of the supervisor that makes the working folder ready and becomes the user's command.

It waits at a gate until its pid is on disk. What goes wrong before the command runs is told through a pipe that a
successful exec closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys

from gpulayer.remote import records
from gpulayer.remote.failpoints import failpoint
from gpulayer.remote.files import Blobs, copy_tree
from gpulayer.remote.wire import RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from gpulayer.remote.gang import Gang
    from gpulayer.remote.runs import Run

GATE = b"g"
READY = b"\n"
"""What the leader tells before it becomes the command. What it tells else is why that did not run."""

_OOM_SHARE = 500
_NOT_STARTED = 127
_PYTHONS = ("python", "python3")

# What the connection or the controller's own shell left in the environment and means nothing to a job.
_FOREIGN = ("SSH_", "GPULAYER_", "GL_FAIL", "OLDPWD", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES")


class _StartError(Exception):
    """Why the command cannot be started; the text is the run's reason."""


def lead(
    run: Run,
    spec: dict[str, Any],
    secrets: dict[str, str],
    blobs: Blobs,
    *,
    umask: int,
    gate: int,
    failure: int,
    gang: Gang | None,
) -> NoReturn:
    """Wait at the gate, make everything ready, and become the command. Runs in a fresh child and never returns."""
    try:
        if os.read(gate, 1) == GATE:
            os.close(gate)
            os.umask(umask)
            _offer_to_oom_killer()
            _start(run, spec, secrets, blobs, failure, gang)
    except (_StartError, RequestError) as error:
        _tell(failure, str(error))
    except Exception as error:  # noqa: BLE001  # whatever it is, the run's reason must say so
        _tell(failure, f"{type(error).__name__}: {error}")
    finally:
        os._exit(_NOT_STARTED)


def reset_signals() -> None:
    """Give a child the signals that any program expects, since exec keeps what is ignored.

    Python itself ignores some, and whoever started the agent may have (nohup, a shell's `&`).
    """
    signal.set_wakeup_fd(-1)
    ours = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGUSR1)
    for number in (*ours, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def environment(
    run: Run,
    spec: dict[str, Any],
    secrets: dict[str, str],
    interpreter: str,
    defaults: dict[str, str],
    *,
    early: bool = False,
) -> dict[bytes, bytes]:
    """Return the environment of the job, or of its setup (contract: "Environment of a job"), as bytes.

    `defaults` are set unless the host's own environment or the user sets them. It is `early` while the interpreter may
    have yet to be made, with another one.
    """
    made = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    made["PWD"] = run.work
    if spec["accelerator"] == "cpu":
        made["CUDA_VISIBLE_DEVICES"] = made["HIP_VISIBLE_DEVICES"] = ""
    elif spec["accelerator"] == "cuda":
        made["CUDA_VISIBLE_DEVICES"] = ",".join(spec["devices"])
        made["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    made.update(spec["select_env"])
    folder = os.path.dirname(interpreter)
    prefix = os.path.dirname(folder)
    if os.path.exists(os.path.join(prefix, "pyvenv.cfg")):
        made["VIRTUAL_ENV"] = prefix
        made.pop("PYTHONHOME", None)
    elif os.path.isdir(os.path.join(prefix, "conda-meta")):
        made["CONDA_PREFIX"] = prefix
    made = {"PYTHONUNBUFFERED": "1", **defaults, **made}
    made.update(spec["env"])
    made.update(secrets)
    made["PATH"] = os.pathsep.join((*_shims(run, interpreter, early=early), folder, made.get("PATH") or os.defpath))
    made["GPULAYER_ACCELERATOR"] = spec["accelerator"]
    made["GPULAYER_JOB"] = spec["job"]
    made["GPULAYER_RUN_ID"] = run.id
    made["GPULAYER_HOST"] = spec["host"]
    made["GPULAYER_DEVICES"] = ",".join(spec["devices"])
    return {os.fsencode(name): os.fsencode(value) for name, value in made.items()}


def interpreter_of(run: Run, spec: dict[str, Any]) -> str:
    """Return the path of the job's interpreter, which need not exist yet: its setup may make it.

    A name without a slash is looked for on PATH; a relative path begins at the working folder; null is the agent's own.
    """
    wanted = spec["python"] or sys.executable
    if "/" not in wanted:
        return shutil.which(wanted) or os.path.join("/nonexistent", wanted)
    return os.path.join(run.work, os.path.expanduser(wanted))


def _start(  # noqa: PLR0917  # what `lead` was given
    run: Run, spec: dict[str, Any], secrets: dict[str, str], blobs: Blobs, failure: int, gang: Gang | None
) -> None:
    interpreter = interpreter_of(run, spec)
    defaults = {} if gang is None else gang.environment()
    _make_work(run, spec, blobs, environment(run, spec, secrets, interpreter, defaults, early=True))
    variables = environment(run, spec, secrets, interpreter, defaults)  # anew: the setup may have made the interpreter
    os.chdir(run.work)
    failpoint("work-made")
    command = spec["command"]
    words = ["/bin/sh", "-e", "-c", command] if isinstance(command, str) else list(command)
    if words[0] in _PYTHONS:
        words[0] = interpreter
    if gang is not None:
        words = gang.words(interpreter, gang.write_wrapper(run.folder), words)
    try:
        raw = [os.fsencode(word) for word in words]
        os.write(failure, READY)
        os.execvpe(raw[0], raw, variables)  # noqa: S606  # the user's own command, word by word
    except FileNotFoundError:
        if os.path.exists(words[0]):
            raise _StartError(f"{words[0]} cannot be executed: what its first line names does not exist") from None
        where = "" if "/" in words[0] else f" on PATH, {os.fsdecode(variables[b'PATH'])}"
        raise _StartError(f"command not found: {words[0]}{where}") from None
    except OSError as error:
        raise _StartError(f"{words[0]} cannot be executed: {error.strerror}") from None


def _make_work(run: Run, spec: dict[str, Any], blobs: Blobs, variables: dict[bytes, bytes]) -> None:
    """Fill the working folder: from the blobs, or as a copy of the folder in which the setup has run."""
    if spec["setup"] is None:
        os.mkdir(run.work)
        _build(blobs, spec, run.work)
    else:
        copy_tree(_prepared(run, spec, blobs, variables), run.work)


def _build(blobs: Blobs, spec: dict[str, Any], folder: str) -> None:
    if spec["tree"] is not None:
        blobs.build(blobs.tree(spec["tree"]), folder)


def prepared_name(spec: dict[str, Any]) -> str:
    """Return the name of the folder in which the setup of a spec runs."""
    identity = json.dumps([spec["tree"], spec["python"] or sys.executable, spec["setup"]])
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def _prepared(run: Run, spec: dict[str, Any], blobs: Blobs, variables: dict[bytes, bytes]) -> str:
    """Return the folder in which the setup has run: once for each shipped tree, interpreter and text of the setup."""
    folder = os.path.join(run.prepared, prepared_name(spec))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    tree, done = os.path.join(folder, "tree"), os.path.join(folder, "done")
    lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(done):
            # The setup runs where its result will stay, since virtual environments hold their own path.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(tree)
            os.mkdir(tree)
            _build(blobs, spec, tree)
            _run_setup(spec["setup"], tree, variables)
            _flush(lock)
            records.replace(done, {"schema": "gpulayer.setup/1"})
    finally:
        os.close(lock)
    return tree


def _flush(descriptor: int) -> None:
    """Force all of a file system to the disk: a crash must not leave half a setup that counts as done."""
    if sys.platform == "darwin":
        os.sync()
    else:
        ctypes.CDLL(None).syncfs(descriptor)  # unlike sync(2) it cannot hang on somebody's sick network mount


def _run_setup(text: str, folder: str, variables: dict[bytes, bytes]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(folder)
            shell = ["/bin/sh", "-e", "-c", text]
            os.execve(shell[0], shell, {**variables, b"PWD": os.fsencode(folder)})  # noqa: S606  # the user's own text
        finally:
            os._exit(_NOT_STARTED)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        raise _StartError(f"setup was ended by signal {os.WTERMSIG(status)}; its output is in the log")
    if status != 0:
        raise _StartError(f"setup exited with {os.WEXITSTATUS(status)}; its output is in the log")


def _shims(run: Run, interpreter: str, *, early: bool) -> list[str]:
    """Make `python` and `python3` mean the interpreter, where its own folder lacks them or means another by them.

    Where it is not there they fail, and say so: further on PATH they would be another one.

    Return the folder that does so, or nothing where it is not needed. It holds scripts and no links: the interpreter
    of a virtual environment finds that by the path it is started with.
    """
    folder, real = os.path.dirname(interpreter), os.path.realpath(interpreter)
    there = os.access(interpreter, os.X_OK)
    lacking = [name for name in _PYTHONS if not there or os.path.realpath(os.path.join(folder, name)) != real]
    if not lacking or (early and not there):
        return []
    os.makedirs(run.shims, mode=0o700, exist_ok=True)
    quoted = interpreter.replace("'", "'\\''")
    for name in lacking:
        with open(os.open(os.path.join(run.shims, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700), "wb") as file:
            file.write(os.fsencode(f"#!/bin/sh\nexec '{quoted}' \"$@\"\n"))
    return [run.shims]


def _offer_to_oom_killer() -> None:
    """Let the kernel prefer the job to its supervisor when memory ends. Raising the score needs no privilege."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
        score = min(1000, int(file.read()) + _OOM_SHARE)
        file.seek(0)
        file.write(str(score))


def _tell(failure: int, reason: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(failure, os.fsencode(reason)[:2000])
