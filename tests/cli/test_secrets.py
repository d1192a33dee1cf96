"""A secret goes from the controller's environment into the job's, and is in clear nowhere else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.command import Commander
from tests.sshd import Farm, SshdHost

pytestmark = pytest.mark.linux("system calls are followed with strace")

VALUE = "s3cr3t-v4lue"
JOBS = """\
version: 1
name: hush
jobs:
  keeps: {accelerator: cpu, secrets: [TOKEN], outputs: ["*.txt"], command: "GATE"}
  tells: {accelerator: cpu, secrets: [TOKEN], command: 'echo "<$TOKEN>"; echo $TOKEN >&2; exit 3'}
  waits: {accelerator: cpu, secrets: [TOKEN], where: {labels: {is: nowhere}}, command: "true"}
"""


def strace(log: Path) -> list[str]:
    """The words before a command whose system calls are written down, those of its descendants too."""
    calls = "execve,write,writev,pwrite64,pwritev,sendto,sendmsg,sendmmsg"
    return ["strace", "-f", "--seccomp-bpf", "-q", "-v", "-s", "100000", "-e", f"trace={calls}", "-o", str(log)]


@dataclass(kw_only=True)
class Traced(SshdHost):
    """A host all of whose system calls are written down."""

    @property
    def calls(self) -> Path:
        return self.log.with_name("calls")

    def command(self, sshd: list[str]) -> list[str]:
        return [*strace(self.calls), *sshd]


@pytest.fixture(scope="module")
def traced(farm: Farm) -> Iterator[Traced]:
    host = farm.host("traced", kind=Traced)
    assert isinstance(host, Traced)
    yield host
    host.stop()


@pytest.fixture
def hush(gpulayer: Commander, farm: Farm, traced: Traced) -> Commander:
    (gpulayer.home / ".ssh").mkdir(mode=0o700)
    (gpulayer.home / ".ssh" / "known_hosts").write_bytes(farm.known_hosts.read_bytes())
    gpulayer.write("inventory.yaml", json.dumps({"version": 1, "hosts": {"there": traced.entry}}))
    gate = f"echo ready; until test -e {gpulayer.folder}/gate; do sleep 0.05; done; echo ${{#TOKEN}} > length.txt"
    gpulayer.write("jobs.yaml", JOBS.replace("GATE", gate))
    gpulayer.extra["TOKEN"] = VALUE
    return gpulayer


def holders(part: str) -> dict[int, str]:
    """The processes that have the value in a file of /proc, each with its command."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if VALUE.encode() in (folder / part).read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def with_value(calls: Path) -> list[str]:
    """The system calls that carry the value, each without its process."""
    return [line.split(maxsplit=1)[1] for line in calls.read_text(errors="replace").splitlines() if VALUE in line]


def test_a_secret_is_in_clear_in_the_jobs_environment_alone(hush: Commander, traced: Traced) -> None:
    shown: list[str] = []

    def run(*words: str, code: int = 0) -> None:
        result = hush(*words)
        assert result.code == code, result
        shown.extend((result.out, result.err))

    run("validate")
    run("plan", code=3)
    run("plan", "--json", code=3)
    ours = hush.folder / "calls"
    words = [*strace(ours), sys.executable, "-m", "gpulayer", "apply", "jobs.yaml", "--yes", "--partial"]
    with subprocess.Popen(
        words, cwd=hush.folder, env=hush.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as applied:
        give_up = time.monotonic() + 60
        while not (seen := {pid: said for pid, said in holders("environ").items() if "length.txt" in said}):
            assert applied.poll() is None
            assert time.monotonic() < give_up
        assert holders("cmdline") == {}
        assert all(
            "gpulayer" in said or "length.txt" in said or said == "sleep 0.05 " for said in holders("environ").values()
        )
        (hush.folder / "gate").touch()
        shown.extend(applied.communicate(timeout=60))
    assert applied.returncode == 3
    assert "tells | <***>" in shown[-2]
    assert seen

    # Ours: it comes in with the program's own environment; what goes out is encrypted.
    first, *more = with_value(ours)
    assert first.startswith("execve(")
    assert {line.partition("(")[0] for line in more} == {"pwrite64"}  # the log of the job that tells it
    # The host's: sshd hands it to the agent's standard input, in a frame of its run's; then the job has it.
    there = with_value(traced.calls)
    handed = [line for line in there if re.match(r'write\(\d+, "@@GL1 ', line) and r"\"op\":\"launch\"" in line]
    begun = [line for line in there if line.startswith("execve(")]
    assert "".join(handed).count(VALUE) == 2  # one write may hold both frames
    assert {f"TOKEN={VALUE}" in line.partition("], [")[2] for line in begun} == {True}
    assert not any(VALUE in line.partition("], [")[0] for line in begun)  # no command line has it
    # The rest is of the job that tells it: what it prints, and how that comes to us.
    rest = [line for line in there if line not in handed and line not in begun]
    told = [line for line in rest if re.match(r'write\([12], "<?s3cr3t', line)]
    logs = [line for line in rest if re.match(r'write\(\d+, "@@GL1 ', line) and r"\"off\":" in line]
    assert len(told) == 2
    assert len(rest) == len(told) + len(logs)

    for after in ("status", "status --json", "logs tells", "logs tells --json", "fetch keeps", "cancel keeps"):
        run(*after.split())
    run("attach", code=1)
    run("attach", "--json", code=1)
    run("apply", "--partial", code=3)
    run("gc", "--older-than", "1s", "--yes")
    assert [text for text in shown if VALUE in text] == []
    folders = (hush.folder / ".gpulayer", hush.home, traced.home, traced.log.parent)
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path != traced.calls]
    holding = {path for path in files if VALUE.encode() in path.read_bytes()}
    assert {path.name for path in holding} == {"output.log"}  # of the job that tells it: what a job prints is its own
    assert {path.parent.name.partition("-")[0] for path in holding} == {"tells"}
    assert next(hush.folder.rglob("length.txt")).read_text() == f"{len(VALUE)}\n"


def test_a_secret_that_is_too_long_is_refused_before_anything_connects(hush: Commander) -> None:
    hush.extra["TOKEN"] = VALUE * 11_000
    result = hush("apply", "jobs.yaml", "--yes", "--partial")
    assert result.code == 2
    assert "the secret TOKEN of keeps has" in result.err
    assert VALUE not in result.out + result.err
