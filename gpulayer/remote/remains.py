"""What is left of a run whose processes are no descendants of its supervisor any more."""

from __future__ import annotations

from gpulayer.remote import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulayer.remote.runs import Run


def orphans(run: Run, leader: tuple[int, int]) -> dict[int, int]:
    """Return the living processes of a run without a supervisor, with their starts, as far as they can be found.

    These are its leader, whoever writes to its logs, the leader's session, and all that descend from them.
    """
    table = processes.living()
    roots = processes.writers(run.logs()) & table.keys()
    pid, start = leader
    if pid in table and table[pid].start == start:
        roots |= {pid} | {process.pid for process in table.values() if process.session == pid}
    elif pid not in table:  # otherwise the number has gone to somebody else, and so may the session's
        session = [process.pid for process in table.values() if process.session == pid]
        roots |= {member for member in session if processes.variable(member, "GPULAYER_RUN_ID") == run.id}
    return {pid: table[pid].start for pid in processes.below(roots, table)}


def traces(run: Run, table: dict[int, processes.Process]) -> set[int]:
    """Return the processes that have a log of a run open for writing, or its id in their environment."""
    writers = processes.writers(run.logs()) & table.keys()
    return writers | {pid for pid in table if processes.variable(pid, "GPULAYER_RUN_ID") == run.id}
