"""probe and plan: which inventory counts, what is shown and saved, how each end is told."""

from __future__ import annotations

import argparse
import json
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from gpulayer.cli.places import inventory_path
from gpulayer.spec import schemas
from tests.cli.command import ROOT, Commander

CASES = ROOT / "tests" / "cases"
HELLO = "version: 1\nname: demo\njobs:\n  hello: {accelerator: cpu, command: [python, -c, 'print(1)']}\n"
WHY = "version: 1\njobs:\n  small: {command: 'true'}\n  never: {accelerator: mps, command: 'true'}\n"
NOWHERE = "version: 1\nname: demo\njobs:\n  big: {accelerator: cpu, resources: {memory_gb: 100000}, command: 'true'}\n"


def holds(value: Any, name: str) -> None:
    errors = [error.message for error in jsonschema_rs.Draft202012Validator(schemas.schema(name)).iter_errors(value)]
    assert not errors


def inventory_of(*names: str) -> str:
    return "version: 1\nhosts:\n" + "".join(f"  {name}: {{transport: local}}\n" for name in names)


def cases(gpulayer: Commander) -> None:
    for path in CASES.iterdir():
        shutil.copy(path, gpulayer.folder / path.name)


def test_the_cases_come_out_as_expected(gpulayer: Commander) -> None:
    cases(gpulayer)
    result = gpulayer("plan", "--facts", "fleet.json", "--json")
    plan = result.json()
    holds(plan, "plan")
    assert plan["applicable"] is False
    jobs = {job["job"]: job for job in plan["jobs"]}
    expected = json.loads((CASES / "expected.json").read_text(encoding="utf-8"))
    assert jobs.keys() == expected.keys()
    for name, wanted in expected.items():
        verdict = plan["shapes"][jobs[name]["shape"]]
        assert sorted(verdict["fits"]) == sorted(wanted["fits"]), name
        for host, codes in wanted["refused"].items():
            found = {entry["code"] for entry in verdict["refusals"] if host in entry["hosts"]}
            assert set(codes) <= found, (name, host)
        assert wanted.get("accelerator", jobs[name]["accelerator"]) == jobs[name]["accelerator"]
    assert result.code == 4  # `gone` might have taken what fits nowhere
    assert not (gpulayer.folder / ".gpulayer" / "plan.json").exists()


def test_a_plan_for_people_fits_in_80_columns_and_says_why_not(gpulayer: Commander) -> None:
    cases(gpulayer)
    shown = gpulayer.on_terminal("plan", "--facts", "fleet.json", "--no-color").out
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert "placement: 12 to run, 5 to wait, 5 refused" in shown
    piped = gpulayer("plan", "--facts", "fleet.json").out
    assert "needs 150 GiB of GPU memory, and 10.67 GiB to 144 GiB of unified memory shared with the CPU" in piped
    assert "cannot be applied" in piped


def test_a_plan_says_which_hosts_a_gang_has_or_waits_for(gpulayer: Commander) -> None:
    cases(gpulayer)
    shown = [line.split(maxsplit=2) for line in gpulayer("plan", "--facts", "fleet.json").out.splitlines()]
    assert ["gang-arm", "run", "mac-studio + macbook + spark cpu"] in shown
    assert ["gang-mixed", "run", "8 hosts: mac-studio, macbook and 6 more cpu"] in shown
    assert ["gang-cuda", "queue", "4  when free: 2 of h200, desktop (cuda)"] in shown
    jobs = "version: 1\njobs: {gang: {accelerator: cuda, distributed: {nodes: 2}, command: 'true'}}\n"
    gpulayer.write("jobs.yaml", jobs)
    assert "desktop + mystery cuda (1 each)" in gpulayer("plan", "--facts", "fleet.json").out
    gpulayer.write("jobs.yaml", jobs.replace("nodes: 2", "nodes: 99"))
    refused = gpulayer("plan", "--facts", "fleet.json").out
    assert ("needs 99 hosts" in refused, "none fits" in refused) == (True, False)
    gpulayer.write("jobs.yaml", jobs.replace("cuda,", "cuda, resources: {gpus: 90},"))
    refused = gpulayer("plan", "--facts", "fleet.json").out
    assert "  needs 2 hosts at once, and none fits: 2 more are needed\n" in refused
    assert "needs 90 devices, and the host has" in refused


def test_doctor_goes_the_whole_way_and_has_a_fix_for_the_step_that_fails(gpulayer: Commander) -> None:
    gpulayer.write("leases", "no folder")
    gpulayer.write(
        "inventory.yaml",
        "version: 1\nhosts:\n  here: {transport: local}\n"
        f"  unleased: {{transport: local, state_dir: ~/2, lease_dir: {gpulayer.folder}/leases}}\n"
        "  gone: {address: 127.0.0.1, port: 1}\n",
    )
    result = gpulayer("doctor")
    assert result.code == 4
    lines = result.out.splitlines()
    assert "here: ok: resolve, connect, host key, authenticate, shell, python, protocol" in lines
    assert any(line.startswith("here: takes jobs (Python 3.") for line in lines)
    assert any(line.startswith("gone: authenticate: FAILED: there is no key") for line in lines)
    assert any(line.startswith("unleased: protocol: FAILED: ") and "leases" in line for line in lines)
    assert sum(line.startswith("  fix: ") for line in lines) == 2
    here, gone = gpulayer("doctor", "here", "gone", "--json").json()["hosts"]
    assert (here["reached"], here["stage"], here["fix"]) == (True, None, None)
    assert (gone["reached"], gone["stage"]) == (False, "authenticate")
    assert gpulayer("doctor", "here").code == 0
    assert gpulayer("doctor", "nobody").code == 2


def test_why_shows_every_reason_of_the_last_plan_for_one_job(gpulayer: Commander) -> None:
    gpulayer.write("jobs.yaml", WHY)
    gpulayer.write(
        "inventory.yaml",
        "version: 1\nhosts:\n  here: {transport: local}\n  full: {transport: local, drain: true, state_dir: ~/2}\n"
        "  gone: {address: 127.0.0.1, port: 1}\n",
    )
    assert "there is no plan" in gpulayer("why", "small").err
    assert gpulayer("plan").code == 4
    small = gpulayer("why", "small")
    assert small.code == 0
    first, second, *reasons, last = small.out.splitlines()
    assert (first.split()[0], second) == ("small:", "  fits: here")
    assert any(line.startswith("  full: ") and line.endswith("[drain: fix the host]") for line in reasons)
    assert any(line.startswith("not reached: gone: ") for line in reasons)
    assert last.startswith("as planned at ")
    assert "  fits: no host" in gpulayer("why", "never").out
    document = gpulayer("why", "never", "--json").json()
    assert (document["schema"], document["job"], document["action"]) == ("gpulayer.why/1", "never", "refuse")
    assert {refusal["code"] for refusal in document["refusals"]} == {"accelerator", "drain", "unreachable"}
    unknown = gpulayer("why", "smal")
    assert unknown.code == 2
    assert "(did you mean 'small'?)" in unknown.err


def test_many_alike_jobs_are_folded_and_all_shows_them(gpulayer: Commander) -> None:
    cases(gpulayer)
    jobs = "".join(f"  j{n}: {{accelerator: cuda, command: 'true'}}\n" for n in range(100))
    gpulayer.write("jobs.yaml", f"version: 1\njobs:\n{jobs}")
    few = gpulayer("plan", "--facts", "fleet.json").out
    assert len(few.splitlines()) < 20
    assert "queue (95 jobs)" in few
    everything = gpulayer("plan", "--facts", "fleet.json", "--all").out
    assert sum(line.startswith("j") for line in everything.splitlines()) == 100


def test_the_inventory_is_looked_for_in_order(gpulayer: Commander, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(gpulayer.home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("GPULAYER_INVENTORY", raising=False)
    monkeypatch.chdir(gpulayer.folder)
    silent = argparse.Namespace(inventory=None)
    assert inventory_path(silent) is None
    config = gpulayer.home / ".config" / "gpulayer" / "inventory.yaml"
    config.parent.mkdir(parents=True)
    config.touch()
    assert inventory_path(silent) == config
    gpulayer.write("inventory.yaml", "")
    assert inventory_path(silent) == Path("inventory.yaml")
    monkeypatch.setenv("GPULAYER_INVENTORY", "env.yaml")
    assert inventory_path(silent) == Path("env.yaml")
    assert inventory_path(argparse.Namespace(inventory="flag.yaml")) == Path("flag.yaml")


def test_without_an_inventory_it_is_this_machine_alone_and_a_line_says_so(gpulayer: Commander) -> None:
    gpulayer.write("jobs.yaml", HELLO)
    result = gpulayer("plan", "--json")
    assert [host["name"] for host in result.json()["hosts"]] == ["local"]
    assert "no inventory: this machine alone" in result.err


def test_probe_tells_what_is_there_and_what_is_not_reached(gpulayer: Commander) -> None:
    gpulayer.write(
        "inventory.yaml",
        "version: 1\nhosts:\n"
        f"  here: {{transport: local, python: {sys.executable}, expect: {{accelerator: mps, count: 1}}}}\n"
        "  gone: {address: 127.0.0.1, port: 1}\n",
    )
    result = gpulayer("probe", "--framework", "torch")
    assert result.code == 4
    assert "here  cpu:0 " in result.out
    assert "torch.distributed.gloo" in result.out
    assert "not reached: gone: authenticate: there is no key" in result.out
    assert "  fix: set identity_file in the inventory" in result.out
    assert "here: the inventory expects 1 mps device, and the probe found none" in result.out
    document = gpulayer("probe", "--json", "here", "--framework", "torch").json()
    assert [host["name"] for host in document["hosts"]] == ["here"]
    holds(document["hosts"][0]["report"], "probe")


def test_an_unknown_host_is_wrong_usage(gpulayer: Commander) -> None:
    gpulayer.write("inventory.yaml", inventory_of("here"))
    result = gpulayer("probe", "her")
    assert (result.code, result.out) == (2, "")
    assert "'her'" in result.err


@pytest.mark.parametrize("words", [("plan",), ("plan", "--json"), ("apply", "jobs.yaml"), ("validate",)])
def test_a_broken_document_is_2_with_line_and_column(gpulayer: Commander, words: tuple[str, ...]) -> None:
    gpulayer.write("jobs.yaml", HELLO.replace("cpu", "cpo"))
    result = gpulayer(*words)
    assert (result.code, result.out) == (2, "")
    assert "jobs.yaml:4:24: accelerator: 'cpo' is not one of" in result.err
    assert "did you mean 'cpu'?" in result.err
    assert "Traceback" not in result.err


def test_hosts_and_folders_that_are_not_there_are_found_before_anything_connects(gpulayer: Commander) -> None:
    gpulayer.write("inventory.yaml", "version: 1\nhosts:\n  there: {address: 127.0.0.1, port: 1}\n")
    gpulayer.write("jobs.yaml", HELLO.replace("cpu,", "cpu, where: {hosts: [ther]}, workdir: nowhere,"))
    for words in (("plan",), ("validate",)):
        result = gpulayer(*words)
        assert result.code == 2
        assert "did you mean 'there'?" in result.err
        assert f"jobs.yaml:4:62: workdir: there is no folder {gpulayer.folder / 'nowhere'}" in result.err


def test_a_plan_is_saved_for_this_user_alone(gpulayer: Commander) -> None:
    gpulayer.write("jobs.yaml", HELLO)
    result = gpulayer("plan", "--json")
    assert result.code == 0
    path = gpulayer.folder / ".gpulayer" / "plan.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_bytes()) == result.json()
    assert [job["action"] for job in result.json()["jobs"]] == ["run"]
    gpulayer("plan", "-o", "mine.json")
    assert json.loads((gpulayer.folder / "mine.json").read_bytes())["project"] == "demo"


def test_what_fits_nowhere_is_3_and_what_might_fit_on_a_silent_host_is_4(gpulayer: Commander) -> None:
    gpulayer.write("jobs.yaml", NOWHERE)
    gpulayer.write("inventory.yaml", inventory_of("here"))
    assert gpulayer("plan").code == 3
    gpulayer.write("inventory.yaml", inventory_of("here") + "  gone: {address: 127.0.0.1, port: 1}\n")
    result = gpulayer("plan")
    assert result.code == 4
    assert "refused: big" in result.out
    assert "  gone: the host cannot be reached, see below [unreachable: fix the host]\n" in result.out
    assert result.out.count("authenticate: there is no key to log in with") == 1
    gpulayer.write("jobs.yaml", HELLO)
    result = gpulayer("plan")
    assert result.code == 0
    assert "not reached: gone: authenticate: " in result.out


def saved(*hosts: object) -> object:
    return {"schema": "gpulayer.fleet/1", "hosts": [*hosts]}


SILENT = {"name": "a", "reached": False, "stage": "connect", "error": "no answer"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "this is not a gpulayer.fleet/1 document"),
        ({"schema": "gpulayer.fleet/1"}, "the fleet has no list of hosts"),
        (saved(5), "hosts[0]: this is not a host with its name"),
        (saved({"name": 1}), "hosts[0]: this is not a host with its name"),
        *((saved({**SILENT, "name": name}), "hosts[0]: this is not a host") for name in ("", "A", "a\n", "\u0430")),
        (saved(SILENT, SILENT), "hosts[1]: the host 'a' is here twice"),
        (saved({**SILENT, "stage": "lunch"}), "hosts[0] (a): the entry has no usable 'stage'"),
        (saved(SILENT, {**SILENT, "name": "b", "error": 5}), "hosts[1] (b): the entry has no usable 'error'"),
        (saved({"name": "a", "reached": True, "report": None}), "hosts[0] (a): report: None is not an object"),
    ],
)
def test_facts_that_do_not_hold_are_said(gpulayer: Commander, content: object, words: str) -> None:
    gpulayer.write("jobs.yaml", HELLO)
    gpulayer.write("fleet.json", json.dumps(content))
    result = gpulayer("plan", "--facts", "fleet.json")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"fleet.json: {words}")
    assert result.err.count("fix:") == 1


def test_a_folder_that_is_not_there_is_told_of_the_jobs_file_with_saved_facts_too(gpulayer: Commander) -> None:
    gpulayer.write("jobs.yaml", "version: 1\njobs:\n  a: {command: x, workdir: gone}\n")
    gpulayer.write("fleet.json", json.dumps(saved(SILENT)))
    result = gpulayer("plan", "--facts", "fleet.json")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("jobs.yaml:3:28: workdir: there is no folder ")


def test_text_of_a_host_is_escaped_in_the_table(gpulayer: Commander) -> None:
    fleet = json.loads((CASES / "fleet.json").read_text(encoding="utf-8"))
    for host in fleet["hosts"]:
        host["error"] = "\x1b]0;pwn\x07\x9b31m\u202e\nlies: 0 refused" if not host["reached"] else None
    gpulayer.write("fleet.json", json.dumps(fleet))
    shutil.copy(CASES / "jobs.yaml", gpulayer.folder)
    for words in ((), ("--json",)):
        result = gpulayer("plan", "--facts", "fleet.json", *words)
        assert result.code == 4
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(result.out + result.err)
        assert not [line for line in result.out.splitlines() if line.startswith("lies")]
