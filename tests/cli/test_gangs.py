"""Gangs as people see them: each rank's lines by its number, and who failed first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.command import Commander

STAND_IN = Path(__file__).parents[1] / "host" / "torchrun"
JOBS = """\
version: 1
name: gangs
defaults: {accelerator: cpu, timeout: 1m, env: {PYTHONPATH: STANDIN}, distributed: {nodes: 1, processes_per_node: 2}}
jobs:
  good: {command: "echo rank $RANK of $WORLD_SIZE; echo $RANK > rank-$RANK.txt", outputs: ["*.txt"]}
  bad: {command: "echo begun; touch $RANK; until test -e 0; do sleep 0.02; done; test $RANK = 0 || exit 7; sleep 30"}
"""


@pytest.fixture
def gangs(gpulayer: Commander) -> Commander:
    host = f"{{transport: local, max_jobs: 4, lease_dir: {gpulayer.home / 'leases'}, python: {sys.executable}}}"
    gpulayer.write("inventory.yaml", f"version: 1\nhosts:\n  here: {host}\n")
    gpulayer.write("jobs.yaml", JOBS.replace("STANDIN", str(STAND_IN)))
    return gpulayer


def test_each_rank_has_its_lines_its_log_and_its_end(gangs: Commander) -> None:
    applied = gangs("apply", "jobs.yaml", "--yes")
    assert applied.code == 1
    for line in ("good/0 | rank 0 of 2", "good/1 | rank 1 of 2", "bad/0 | begun", "bad/1 | begun"):
        assert line in applied.out.splitlines()
    assert "bad: exited 7: rank 1 on here failed first" in applied.err
    assert "what rank 1 said: gpulayer logs bad --rank 1" in (applied.out + applied.err).splitlines()
    assert "good: exited 0" in applied.err.splitlines()
    assert "is left" not in applied.err
    assert "1 succeeded, 1 failed" in applied.out + applied.err

    status = gangs("status")
    assert "exited 7: rank 1 on here failed first" in status.out
    good, bad = gangs("status", "--json").json()["runs"]
    assert (good["job"], [rank["code"] for rank in good["nodes"][0]["ranks"]]) == ("good", [0, 0])
    assert [(rank["status"], rank["reason"]) for rank in bad["nodes"][0]["ranks"]] == [
        ("cancelled", "stopped because rank 1 on here failed"), ("exited", None),
    ]  # fmt: skip
    assert bad["first_failure"] == {"rank": 1, "host": "here", "code": 7, "signal": None}

    assert [line for line in gangs("logs", "good").out.splitlines() if "rank" in line] == [
        "good/0 | rank 0 of 2", "good/1 | rank 1 of 2",
    ]  # fmt: skip
    assert gangs("logs", "good", "--rank", "1").out == "good/1 | rank 1 of 2\n"
    assert gangs("logs", good["nodes"][0]["run"], "--rank", "0", "--raw").out == "rank 0 of 2\n"
    (event,) = [
        entry for entry in gangs("logs", "good", "--rank", "0", "--json").events() if entry["event"] == "output"
    ]
    assert (event["rank"], event["host"], event["text"]) == (0, "here", "rank 0 of 2\n")
    none = gangs("logs", "good", "--rank", "2")
    assert (none.code, "its ranks are 0 to 1" in none.err) == (2, True)
    outputs = gangs.folder / ".gpulayer" / "runs" / good["nodes"][0]["run"] / "outputs"
    assert sorted(path.name for path in outputs.iterdir()) == ["rank-0.txt", "rank-1.txt"]
    assert gangs("logs", "good", "--rank", "one").code == 2


def test_what_is_removed_from_the_hosts_is_known_all_the_same(gangs: Commander) -> None:
    assert gangs("apply", "jobs.yaml", "--yes").code == 1
    removed = gangs("gc", "--yes", "--json", "--older-than", "0s").json()
    assert [run["job"] for run in removed["hosts"][0]["runs"]] == ["bad", "good"]
    again = gangs("apply", "jobs.yaml", "--yes", "--json")
    assert again.events()[-1]["counts"] == {"up_to_date": 1, "failed": 1}


def test_a_gang_one_of_whose_hosts_is_silent_is_unknown_until_it_answers(gangs: Commander) -> None:
    def host(name: str) -> str:
        home = gangs.home / name
        return f"transport: local, lease_dir: {home}-leases, state_dir: {home}, max_jobs: 1, python: {sys.executable}"

    def inventory(beta: str) -> None:
        entries = {"alpha": host("alpha"), "beta": beta, "gamma": host("gamma")}
        lines = [f"  {name}: {{{entry}}}\n" for name, entry in entries.items()]
        gangs.write("inventory.yaml", f"version: 1\nhosts:\n{''.join(lines)}")

    def ends(*words: str) -> dict[str, int]:
        counts: dict[str, int] = gangs(*words, "--json").events()[-1]["counts"]
        return counts

    inventory(host("beta"))
    gate = gangs.folder / "gate"
    command = f"until test -e {gate}; do sleep 0.02; done; echo rank $RANK | tee out"
    defaults = f"defaults: {{timeout: 1m, env: {{PYTHONPATH: {STAND_IN}}}, distributed: {{nodes: 2}}}}"
    pair = f'{{command: "{command}", where: {{hosts: [alpha, beta]}}, outputs: [out]}}'
    gangs.write("jobs.yaml", f"version: 1\n{defaults}\njobs:\n  pair: {pair}\n  next: {{command: echo}}\n")
    assert ends("apply", "jobs.yaml", "--yes", "--detach") == {"running": 1, "queued": 1}
    gate.touch()
    while gangs("status", "--json").json()["runs"][0]["status"] != "exited":
        pass
    inventory("port: 1, address: 127.0.0.1")
    assert ends("apply", "jobs.yaml", "--yes", "--partial") == {"unknown": 1, "succeeded": 1}
    run = next(one for one in gangs("status", "--json").json()["runs"] if one["job"] == "pair")
    assert (run["status"], [node["status"] for node in run["nodes"]]) == ("unknown", ["exited", "unknown"])
    outputs = [gangs.folder / ".gpulayer" / "runs" / node["run"] / "outputs" / "out" for node in run["nodes"]]
    assert gangs("fetch", "pair").code == 4
    assert [path.exists() for path in outputs] == [True, False]
    inventory(host("beta"))
    assert ends("apply", "jobs.yaml", "--yes") == {"up_to_date": 2}
    assert [path.read_text() for path in outputs] == ["rank 0\n", "rank 1\n"]
    assert "pair/1 | rank 1" in gangs("logs", "pair").out
