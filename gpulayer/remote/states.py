"""The words of a run's status and the one table of moves between them, shared by host and controller."""

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
ORPHANED = "orphaned"
UNKNOWN = "unknown"

FINAL: frozenset[str] = frozenset({EXITED, SIGNALED, TIMED_OUT, CANCELLED, FAILED_TO_START, LOST})
LIVE: frozenset[str] = frozenset({LAUNCHING, RUNNING, STOPPING, ORPHANED})

LOST_REASONS: frozenset[str] = frozenset({"reboot", "supervisor_died", "never_started"})

# A host that does not answer makes any status that is not final `unknown`; asking it again settles that.
MOVES: dict[str, frozenset[str]] = {
    QUEUED: frozenset({LAUNCHING, CANCELLED}),
    LAUNCHING: frozenset({QUEUED, RUNNING, FAILED_TO_START, CANCELLED, LOST, UNKNOWN}),
    RUNNING: frozenset({STOPPING, EXITED, SIGNALED, TIMED_OUT, CANCELLED, FAILED_TO_START, LOST, ORPHANED, UNKNOWN}),
    STOPPING: frozenset({EXITED, SIGNALED, TIMED_OUT, CANCELLED, LOST, ORPHANED, UNKNOWN}),
    ORPHANED: frozenset({EXITED, SIGNALED, TIMED_OUT, CANCELLED, LOST, UNKNOWN}),
    UNKNOWN: frozenset({RUNNING, STOPPING, ORPHANED, EXITED, SIGNALED, TIMED_OUT, CANCELLED, FAILED_TO_START, LOST}),
    EXITED: frozenset(),
    SIGNALED: frozenset(),
    TIMED_OUT: frozenset(),
    CANCELLED: frozenset(),
    FAILED_TO_START: frozenset(),
    LOST: frozenset(),
}
