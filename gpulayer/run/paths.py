"""Where everything of a project lies on the controller: one class knows every path below `.gpulayer/`."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Final

from gpulayer.errors import StateError, UsageError
from gpulayer.spec.files import unusable

NAME: Final = ".gpulayer"
JOBS: Final = "jobs.yaml"
RUN_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


def put_aside(path: Path, ending: str) -> str:
    """Return the command that a person may paste to move something out of the way."""
    return f"mv {quote(str(path))} {quote(f'{path}{ending}')}"


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths of one project; `folder` is where its jobs file lies."""

    folder: Path

    @property
    def root(self) -> Path:
        """`.gpulayer/` itself (0700)."""
        return self.folder / NAME

    @property
    def database(self) -> Path:
        """History and current view of the runs."""
        return self.root / "state.db"

    @property
    def plan(self) -> Path:
        """The last plan."""
        return self.root / "plan.json"

    @property
    def hashes(self) -> Path:
        """Cache of the hashes of shipped files, by size and time."""
        return self.root / "hashes.json"

    def lock(self, project: str) -> Path:
        """Return the file that whoever launches runs of a project holds locked."""
        return self.root / f"{project}.lock"

    def run(self, run: str) -> Path:
        """Return a run's folder. Run ids come from hosts too, hence the check (UsageError)."""
        if not RUN_ID.fullmatch(run):
            raise UsageError(f"{run!r} is not a run id", fix="name a job, or a run id of `gpulayer status --json`")
        return self.root / "runs" / run

    def log(self, run: str, rank: int | None = None) -> Path:
        """Return the file that holds a run's output, byte for byte as on the host; in a gang, that of one of its ranks.

        A gang's ranks have theirs in the folder of their node's run, whose own log has the words of torchrun.
        """
        return self.run(run) / ("output.log" if rank is None else f"rank-{rank}.log")

    def outputs(self, run: str) -> Path:
        """Return the folder into which a run's outputs are fetched."""
        return self.run(run) / "outputs"

    def create(self) -> None:
        """Make `.gpulayer/` for this user alone; StateError where something else stands in its place."""
        try:
            self.root.mkdir(mode=0o700, exist_ok=True)
            found = os.lstat(self.root)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise StateError(
                    f"{self.root} is a link or belongs to somebody else, so that others could change what it says",
                    fix=f"look at it and move it away: {put_aside(self.root, '.old')}",
                )
            if found.st_mode & 0o077:
                self.root.chmod(0o700)
        except OSError as error:
            raise StateError(
                f"{self.root} cannot be made: {error.strerror}", fix="make the folder of the jobs file writable"
            ) from error

    def create_run(self, run: str) -> None:
        """Make the folder of a run."""
        self.run(run).mkdir(mode=0o700, parents=True, exist_ok=True)


def find_folder(start: Path) -> Path:
    """Return the nearest folder from `start` upward with a `.gpulayer/` or a jobs file; UsageError where is none."""
    start = start.resolve()
    for folder in (start, *start.parents):
        if (folder / NAME).is_dir() or (folder / JOBS).is_file():
            return folder
    if (jobs := start / JOBS).exists():
        raise UsageError(f"{jobs}: {unusable(jobs.stat().st_mode)}", fix="move it away, or name the jobs file")
    raise UsageError(
        f"there is neither {NAME} nor {JOBS} in {start} or above it: nothing was applied here",
        fix="go to the folder of the jobs file; `gpulayer plan FILE` takes one of another name",
    )


def write_private(path: Path, data: bytes) -> None:
    """Replace a file as a whole (0600): a reader sees the old or the new one, also after a power loss."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise StateError(f"{path} cannot be written: {error.strerror}", fix="free space or make it writable") from error
