"""The commands against a real sshd: an unknown key is shown and written only when that was asked for."""

from __future__ import annotations

import json

from tests.cli.command import Commander
from tests.sshd import SshdHost


def test_an_unknown_host_key_is_refused_then_shown_and_written_on_request(
    gpulayer: Commander, plain_host: SshdHost
) -> None:
    gpulayer.write("inventory.yaml", json.dumps({"version": 1, "hosts": {"there": plain_host.entry}}))
    gpulayer.write("jobs.yaml", "version: 1\njobs:\n  hello: {accelerator: cpu, command: 'echo hello from afar'}\n")
    refused = gpulayer("plan")
    assert refused.code == 4
    assert "host key" in refused.out
    known = gpulayer.home / ".ssh" / "known_hosts"
    assert not known.exists()
    accepted = gpulayer("plan", "--accept-new-host-key")
    assert accepted.code == 0
    assert plain_host.fingerprint in accepted.err
    assert known.exists()
    applied = gpulayer("apply", "--json")
    assert applied.code == 0
    assert "".join(event["text"] for event in applied.events() if event["event"] == "output") == "hello from afar\n"
