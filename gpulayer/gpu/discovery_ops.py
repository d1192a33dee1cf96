"""Operators and dtypes, each tried on one device and compared with what is known to be right. SHIPPED.

Asked on demand, since it takes a minute where a device compiles its kernels. All in one child first; where that ends
early (an assertion of Metal aborts the process), the culprit is known and the rest are asked one child each. A result
says what this one small use did on this device with these versions, and nothing of other sizes, layouts or operators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpulayer.gpu.discovery_notes import Notes
from gpulayer.gpu.discovery_report import Part, Target, texts
from gpulayer.gpu.discovery_system import Answer

OPS_LIMIT_S = 60.0
_ALONE_LIMIT_S = 30.0

RESULTS = ("ok", "unsupported", "wrong", "error", "crashed", "timeout")

# A dtype or operator that is not there raises one of these, or says so in a RuntimeError or ValueError.
_ABSENT = ("TypeError", "NotImplementedError", "AttributeError")
_SAYS_ABSENT = re.compile(
    r"not (?:yet |currently )?(?:implemented|supported)|unsupported|n[o']t have support|n[o']t support", re.IGNORECASE
)

# What Metal can not have (PyTorch's MPS page, "Double-precision types"). Where it works, the CPU did it.
_IMPOSSIBLE = {"mps": ("float64", "complex128")}

Ask = Callable[[Sequence[str], float], Answer]


class Proven(NamedTuple):
    """What was found out on one device: result by key, the class of the exception by key, memory after it all."""

    ops: dict[str, str]
    errors: dict[str, str]
    memory: Part


def prove(name: str, target: Target, ask: Ask, notes: Notes) -> Proven:
    """Try every operator and dtype of the framework `name` on `target`.

    `ask(arguments, limit)` runs its child; what was not reached before the shared deadline is left out.
    """
    answer = ask([target.word], OPS_LIMIT_S)
    notes.add_child(f"{name} ops", answer)
    keys = texts(answer.values.get("keys"))
    ops, errors = _results(answer, keys)
    missing = [key for key in keys if key not in ops]
    for key in missing:
        alone = ask([target.word, key], _ALONE_LIMIT_S)
        if alone.outcome.timed_out:
            notes.add_child(f"{name} ops", alone)
        found = _results(alone, [key])
        ops.update(found[0])
        errors.update(found[1])
    if suspects := [key for key in _IMPOSSIBLE.get(target.word, ()) if ops.get(key) == "ok"]:
        message = f"{' and '.join(suspects)} worked on {target.word}, which has neither: the CPU computed instead."
        notes.add("cpu_fallback_suspected", target.device, message)
        ops.update(dict.fromkeys(suspects, "wrong"))
    memory = answer.values.get("memory")
    return Proven(dict(sorted(ops.items())), errors, memory if isinstance(memory, dict) else {})


def _results(answer: Answer, keys: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the results and exception classes of one child; what it died of is the step that it was in."""
    ops = {key: answer.values[key] for key in keys if answer.values.get(key) in RESULTS}
    errors = {}
    for key in keys:
        if key in answer.errors:
            kind, _, message = answer.errors[key].partition(": ")
            absent = kind in _ABSENT or _SAYS_ABSENT.search(message)
            ops[key], errors[key] = "unsupported" if absent else "error", kind[:100]
    step = answer.values.get("step")
    if not answer.done and isinstance(step, str) and step in keys and step not in ops:
        ops[step] = "timeout" if answer.outcome.timed_out else "crashed"
    return ops, errors
