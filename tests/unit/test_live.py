"""How a run's end is said."""

from __future__ import annotations

import pytest

from gpulayer.cli.endings import ended


@pytest.mark.parametrize(
    ("status", "code", "sent", "reason", "words"),
    [
        ("exited", 3, None, None, "exited 3"),
        ("exited", 137, None, None, "exited 137: killed, probably for memory"),
        ("signaled", None, 9, None, "killed by SIGKILL, probably for memory"),
        ("signaled", None, 11, None, "killed by SIGSEGV"),
        ("signaled", None, 99, None, "killed by signal 99"),
        ("cancelled", None, 9, "me", "cancelled (me)"),
        ("lost", None, None, "supervisor_died", "lost (supervisor died)"),
        ("lost", None, None, "gpu_box was lost", "lost (gpu_box was lost)"),
        ("cancelled", None, None, "mary_ann", "cancelled (mary_ann)"),
        ("failed_to_start", None, None, "no such file: my_tool", "failed to start (no such file: my_tool)"),
    ],
)
def test_an_end_in_words(status: str, code: int | None, sent: int | None, reason: str | None, words: str) -> None:
    assert ended(status, code, sent, reason) == words
