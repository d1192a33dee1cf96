"""The words of a run's status and the one table of moves between them, shared by host and controller."""

from __future__ import annotations

QUEUED = "queued"
LAUNCHING = "launching"
RUNNING = "running"
STOPPING = "stopping"
EXITED = "exited"
SIGNALED = "signaled"
TIMED_OUT = "timed_out"
CANCELLED = "cancelled"
FAILED_TO_START = "failed_to_start"
LOST = "lost"
LOG_CAPPED = "log_capped"
ORPHANED = "orphaned"
UNKNOWN = "unknown"

FINAL: frozenset[str] = frozenset({EXITED, SIGNALED, TIMED_OUT, CANCELLED, FAILED_TO_START, LOST, LOG_CAPPED})
LIVE: frozenset[str] = frozenset({LAUNCHING, RUNNING, STOPPING, ORPHANED})

# A host that does not answer makes any status that is not final `unknown`; asking it again settles that.
MOVES: dict[str, frozenset[str]] = {
    QUEUED: frozenset({LAUNCHING, CANCELLED}),
    LAUNCHING: frozenset({QUEUED, RUNNING, FAILED_TO_START, CANCELLED, LOST, UNKNOWN}),
    RUNNING: frozenset(
        {STOPPING, EXITED, SIGNALED, TIMED_OUT, CANCELLED, LOG_CAPPED, FAILED_TO_START, LOST, ORPHANED, UNKNOWN}
    ),
    # What stops may have failed to start: a gang's node, whose other ranks did.
    STOPPING: frozenset({EXITED, SIGNALED, TIMED_OUT, CANCELLED, LOG_CAPPED, FAILED_TO_START, LOST, ORPHANED, UNKNOWN}),
    ORPHANED: frozenset({EXITED, SIGNALED, TIMED_OUT, CANCELLED, LOG_CAPPED, LOST, UNKNOWN}),
    UNKNOWN: frozenset(
        {RUNNING, STOPPING, ORPHANED, EXITED, SIGNALED, TIMED_OUT, CANCELLED, LOG_CAPPED, FAILED_TO_START, LOST}
    ),
    EXITED: frozenset(),
    SIGNALED: frozenset(),
    TIMED_OUT: frozenset(),
    CANCELLED: frozenset(),
    FAILED_TO_START: frozenset(),
    LOST: frozenset(),
    LOG_CAPPED: frozenset(),
}


def move(old: str, new: str) -> str:
    """Return `new`, the status that follows `old`. Raises ValueError where the table has no such move."""
    if new != old and new not in MOVES[old]:
        raise ValueError(f"a run that is {old} cannot become {new}")
    return new


def picture() -> str:
    """Return the table as a Mermaid state diagram, which `docs/states.md` holds."""
    lines = ["stateDiagram-v2", f"    [*] --> {QUEUED}"]
    lines += [f"    {old} --> {new}" for old, after in MOVES.items() for new in MOVES if new in after]
    lines += [f"    {last} --> [*]" for last in MOVES if last in FINAL]
    return "\n".join(lines) + "\n"
