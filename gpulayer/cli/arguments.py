"""The command line's grammar: every command and option, each with one example. Imports nothing but argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

# Kept here as words: importing the modules that own them would make `--help` slow. A test holds them equal.
SCHEMAS = ("inventory", "jobs", "probe", "plan", "event", "status")
FRAMEWORKS = ("torch", "mlx", "executorch")

_Command = Callable[..., argparse.ArgumentParser]

DESCRIPTION = """\
Run jobs on a fleet of Macs, CUDA machines and CPU hosts over SSH: say what you
want, see where it goes.
"""
EPILOG = """\
start with:
  gpulayer probe                 what is there
  gpulayer plan jobs.yaml        what would run where, and why not elsewhere
  gpulayer apply                 run it, and follow

exit codes:
  0   all is well
  1   a job failed, timed out, was cancelled or lost
  2   wrong usage or an invalid document
  3   a job cannot be placed
  4   a host that was needed could not be reached
  5   the plan is stale
  6   the question was answered with no
  70  a fault in gpulayer itself
  130 interrupted while following; started jobs go on

The inventory is --inventory FILE, $GPULAYER_INVENTORY, ./inventory.yaml or
~/.config/gpulayer/inventory.yaml; without one it is this machine alone.
Commands after `apply` work in the folder of the jobs file or below it.
NO_COLOR=1 turns colour off; GPULAYER_DEBUG=1 shows tracebacks.
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help in which an option's name is never broken at its hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap

        return textwrap.wrap(text, width, break_on_hyphens=False)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return what was asked; `command` is the command's name. Wrong usage ends the program with exit code 2."""
    args, unknown = _parser().parse_known_args(argv)
    if unknown:
        shown = (word if word.isprintable() else repr(word) for word in unknown)
        args.parser.error(f"unrecognized arguments: {' '.join(shown)}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpulayer",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")

    def command(name: str, what: str, example: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=f"example:\n  {example}",
            parents=[*parents, _output()],
            formatter_class=_Help,
            allow_abbrev=False,
        )
        made.set_defaults(parser=made)  # whose usage is shown where an argument is not known
        return made

    _asking(command)
    _planning(command)
    _running(command)
    return parser


def _output() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    group = common.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="JSON alone on stdout (%(prog)s --json | jq .)")
    group.add_argument("--no-color", action="store_true", help="no colour; so does NO_COLOR=1")
    return common


def _inventory() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--inventory", metavar="FILE", help="the hosts (%(prog)s --inventory lab.yaml)")
    return common


def _connecting() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, parents=[_inventory()])
    common.add_argument(
        "--accept-new-host-key",
        action="store_true",
        help="show the fingerprint of a host key that is not known yet and write it to known_hosts; "
        "a changed key is never accepted (%(prog)s --accept-new-host-key)",
    )
    return common


def _age(text: str) -> int:
    """Read an age such as `7d` as seconds."""
    number, unit = text[:-1], {"s": 1, "m": 60, "h": 3_600, "d": 86_400}.get(text[-1:])
    if unit is None or not (number.isascii() and number.isdigit()) or len(number) > 6:  # noqa: PLR2004 - centuries
        raise argparse.ArgumentTypeError(f"{text!r} is no age: write 12h or 7d")
    return int(number) * unit


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 6:  # noqa: PLR2004 - more than any gang has
        raise argparse.ArgumentTypeError(f"{text!r} is no rank: a number from 0")
    return int(text)


def _asking(command: _Command) -> None:
    command("init", "write inventory.yaml: the hosts of ~/.ssh/config and this machine", "gpulayer init")

    validate = command(
        "validate",
        "check documents without touching a host",
        "gpulayer validate jobs.yaml inventory.yaml",
        _inventory(),
    )
    validate.add_argument("files", nargs="*", metavar="FILE", help="jobs files and inventories; default: those in use")

    schema = command("schema", "print the JSON Schema of a document", "gpulayer schema jobs > jobs.schema.json")
    schema.add_argument("name", choices=SCHEMAS, help="which one (gpulayer schema inventory)")

    command("matrix", "show which jobs are supported where, and on what evidence", "gpulayer matrix --json")


def _planning(command: _Command) -> None:
    fresh = argparse.ArgumentParser(add_help=False)
    fresh.add_argument(
        "--fresh", action="store_true", help="ask again for what hosts keep in their caches (%(prog)s --fresh)"
    )
    probe = command(
        "probe", "ask the hosts what they are and show it", "gpulayer probe mac-studio gpu-box", _connecting(), fresh
    )
    probe.add_argument("hosts", nargs="*", metavar="HOST", help="only these (gpulayer probe mac-studio)")
    probe.add_argument(
        "--framework",
        action="append",
        choices=FRAMEWORKS,
        dest="frameworks",
        help="look at this framework alone; may be repeated; default: all (gpulayer probe --framework torch)",
    )
    probe.add_argument(
        "--deep",
        action="store_true",
        help="try operators and dtypes on each framework's first device; later plans go by it (gpulayer probe --deep)",
    )
    probe.add_argument(
        "--python",
        metavar="PATH",
        help="the interpreter to look into, on the hosts; default: the inventory's (--python ~/venvs/mlx/bin/python)",
    )

    doctor = command(
        "doctor", "check the whole way to a host, each failure with its fix", "gpulayer doctor gpu-box", _connecting()
    )
    doctor.add_argument("hosts", nargs="*", metavar="HOST", help="only these (gpulayer doctor mac-studio)")

    plan = command(
        "plan", "show what would run where, and why not, and save it", "gpulayer plan jobs.yaml", _connecting(), fresh
    )
    plan.add_argument("jobs", nargs="?", metavar="jobs.yaml", help="the jobs; default: ./jobs.yaml")
    plan.add_argument("-o", "--output", metavar="FILE", help="save the plan here (gpulayer plan -o friday.json)")
    plan.add_argument(
        "--facts", metavar="FILE", help="plan against a saved `probe --json`; asks no host (--facts fleet.json)"
    )
    plan.add_argument("--retry-failed", action="store_true", help="also run again what failed before")
    plan.add_argument("--all", action="store_true", help="show every job and host, however many (gpulayer plan --all)")

    why = command("why", "show why a job is where it is, or what would have to change", "gpulayer why train")
    why.add_argument("job", metavar="JOB", help="a job of the last plan (gpulayer why train)")

    apply = command(
        "apply", "carry out the plan and follow it to the end", "gpulayer apply jobs.yaml --yes", _connecting(), fresh
    )
    apply.add_argument(
        "plan", nargs="?", metavar="jobs.yaml|plan.json", help="jobs to plan and run, or a plan; default: the last plan"
    )
    apply.add_argument("-y", "--yes", action="store_true", help="ask nothing (gpulayer apply jobs.yaml --yes)")
    apply.add_argument("--partial", action="store_true", help="run what can be placed, though something else cannot")
    apply.add_argument("--retry-failed", action="store_true", help="also run again what failed before")
    apply.add_argument(
        "--detach", action="store_true", help="return once all that can start are launched (gpulayer apply --detach)"
    )


def _running(command: _Command) -> None:
    command("attach", "follow what runs, and go on with the queue", "gpulayer attach", _connecting())

    status = command("status", "show the runs of this project", "gpulayer status", _connecting())
    status.add_argument(
        "--hosts",
        action="store_true",
        help="show what holds each device, of whatever project (gpulayer status --hosts)",
    )

    logs = command("logs", "print the output of a job", "gpulayer logs train -f", _connecting())
    logs.add_argument("job", metavar="JOB", help="a job, or a run id of `status --json` (gpulayer logs train)")
    logs.add_argument("--rank", type=_rank, metavar="N", help="that rank of a distributed job alone (--rank 3)")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job ends (gpulayer logs train -f)")
    logs.add_argument(
        "--raw",
        action="store_true",
        help="the bytes as they are, into a file or pipe (gpulayer logs train --raw > log)",
    )

    cancel = command("cancel", "cancel jobs, waiting ones too", "gpulayer cancel train eval", _connecting())
    cancel.add_argument("jobs", nargs="*", metavar="JOB", help="jobs or run ids (gpulayer cancel train)")
    cancel.add_argument("--all", action="store_true", help="all jobs of this project (gpulayer cancel --all)")

    gc = command("gc", "remove what old runs have left on the hosts", "gpulayer gc --older-than 7d", _connecting())
    gc.add_argument("hosts", nargs="*", metavar="HOST", help="only these (gpulayer gc mac-studio)")
    gc.add_argument(
        "--older-than",
        type=_age,
        default="30d",
        metavar="AGE",
        help="runs that ended longer ago than this: 12h, 7d; default: 30d (gpulayer gc --older-than 7d)",
    )
    gc.add_argument("-y", "--yes", action="store_true", help="remove it and ask nothing (gpulayer gc --yes)")

    fetch = command("fetch", "bring a job's outputs here", "gpulayer fetch train", _connecting())
    fetch.add_argument("job", metavar="JOB", help="a job, or a run id of `status --json` (gpulayer fetch train)")
