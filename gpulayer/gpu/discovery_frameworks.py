"""Asking the frameworks of the jobs' interpreter: each in its own child, what they said kept on the host. SHIPPED."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpulayer.gpu.discovery_cache import cache_key, cached, keep
from gpulayer.gpu.discovery_executorch import executorch_settled, read_executorch
from gpulayer.gpu.discovery_mlx import mlx_settled, read_mlx
from gpulayer.gpu.discovery_ops import prove
from gpulayer.gpu.discovery_process import Outcome
from gpulayer.gpu.discovery_report import Part, Reading, Scene, text
from gpulayer.gpu.discovery_system import Answer
from gpulayer.gpu.discovery_torch import read_torch, torch_settled

# A job is told its devices by these, so its framework is probed without what an rc file says of them.
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

# Variables that change what a framework finds; the ones that start so, too.
_DECISIVE = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTORCH_", "HSA_", "CUDA_", "MLX_")

# Two big imports at once need memory and gain seconds.
_ROOM_BYTES = 8 << 30


class _Framework(NamedTuple):
    """How one framework is asked and judged. `limit` in seconds; `ops`: its child for operators and dtypes."""

    child: str
    limit: float
    read: Callable[[Answer, Scene], Reading]
    settled: Callable[[Answer, list[Part]], bool]
    ops: str | None


_FRAMEWORKS = {
    "torch": _Framework("torch_child", 60.0, read_torch, torch_settled, "torch_ops_child"),
    "mlx": _Framework("mlx_child", 30.0, read_mlx, mlx_settled, "mlx_ops_child"),
    "executorch": _Framework("executorch_child", 90.0, read_executorch, executorch_settled, None),
}
FRAMEWORKS = tuple(_FRAMEWORKS)


class Memory(NamedTuple):
    """Where answers are kept (None: nowhere), what they all stand on, and whether kept ones may be used."""

    folder: str | None
    facts: Sequence[object]
    use: bool

    def key(self, what: str) -> str:
        """Return the key of the answer to one question."""
        return cache_key([what, *self.facts])


class Interpreter(NamedTuple):
    """The jobs' interpreter: the path that starts it, and what it said of itself."""

    path: str
    said: Answer

    @property
    def works(self) -> bool:
        """Whether it could be started."""
        return "executable" in self.said.values


def add_frameworks(
    names: Sequence[str],
    interpreter: Interpreter,
    scene: Scene,
    *,
    version: str,
    folder: str | None,
    fresh: bool,
    deep: bool,
) -> tuple[list[Part], list[str]]:
    """Return the entries of the frameworks `names` and the capabilities that they showed.

    Adds notes, and to the devices what frameworks know of them. `version` is the probe's; answers are kept in `folder`.
    """
    if not interpreter.works:
        return [_entry(name, interpreter.path, None) for name in names], []
    memory = _memory(interpreter, scene, version, folder, fresh=fresh)
    answers = _ask_all(names, interpreter, scene, memory)
    entries, capabilities = [], []
    for name, (answer, from_cache) in zip(names, answers):
        framework = _FRAMEWORKS[name]
        if not from_cache:
            _keep(name, answer, scene, memory)
        scene.notes.add_child(name, answer)
        reading = framework.read(answer, scene)
        detail = {**reading.detail, **_ops(name, reading, interpreter, scene, memory, deep=deep)}
        entries.append(_entry(name, interpreter.path, answer, detail, cached=from_cache))
        capabilities += reading.capabilities
    return entries, capabilities


def status_of(answer: Answer) -> str:
    """Return the report's word for how asking a framework ended."""
    if answer.outcome.error is not None:
        return "not_probed"
    if "missing" in answer.errors:
        return "not_installed"
    if "import" in answer.errors:
        return "import_failed"
    if answer.outcome.timed_out:
        return "timeout"
    return "ok" if answer.done else "crashed"


def _memory(interpreter: Interpreter, scene: Scene, version: str, folder: str | None, *, fresh: bool) -> Memory:
    environ = scene.system.environ
    decisive = {key: value for key, value in environ.items() if key.startswith(_DECISIVE) and key not in VISIBILITY}
    devices = [(device["id"], device["driver_version"]) for device in scene.devices]
    known = [interpreter.said.values.get(key) for key in ("executable", "real_path", "version", "search_path")]
    boot = scene.host["boot_id"]
    # An answer holds for one boot.
    return Memory(folder if boot is not None else None, [version, known, boot, devices, decisive], not fresh)


def _ask_all(names: Sequence[str], interpreter: Interpreter, scene: Scene, memory: Memory) -> list[tuple[Answer, bool]]:
    """Ask all at once where there is room for it, since their limits together are beyond the deadline."""

    def ask(name: str) -> tuple[Answer, bool]:
        return _ask(name, interpreter, scene, memory)

    if len(names) > 1 and (scene.host["memory_bytes"] or 0) > _ROOM_BYTES:
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  # most probes ask for one framework

        with ThreadPoolExecutor(len(names)) as pool:
            return list(pool.map(ask, names))
    return [ask(name) for name in names]


def _ask(name: str, interpreter: Interpreter, scene: Scene, memory: Memory) -> tuple[Answer, bool]:
    """Return a framework's answers, and whether they are what it said before."""
    framework = _FRAMEWORKS[name]
    folder, key = memory.folder, memory.key(name)
    kept = cached(folder, key) if folder is not None and memory.use else None
    if kept is not None:
        outcome = Outcome(code=0, elapsed_ms=kept["elapsed_ms"])
        return Answer(kept["values"], kept["errors"], valid=True, outcome=outcome), True
    answer = scene.system.child(
        framework.child, python=interpreter.path, limit=framework.limit, env=_environment(scene)
    )
    return answer, False


def _keep(name: str, answer: Answer, scene: Scene, memory: Memory) -> None:
    """Keep an answer that will be the same next time: all works that could, or the framework is not installed."""
    status = status_of(answer)
    works = status == "ok" and answer.valid and _FRAMEWORKS[name].settled(answer, scene.devices)
    if memory.folder is not None and (works or status == "not_installed"):
        elapsed = answer.outcome.elapsed_ms
        keep(memory.folder, memory.key(name), {"values": answer.values, "errors": answer.errors, "elapsed_ms": elapsed})


def _environment(scene: Scene) -> dict[str, str]:
    """Return a child's environment: all devices, in the order of their addresses, and no operator left to the CPU."""
    env = {key: value for key, value in scene.system.environ.items() if key not in VISIBILITY}
    env.update(CUDA_DEVICE_ORDER="PCI_BUS_ID", PYTORCH_ENABLE_MPS_FALLBACK="0")
    return env


def _ops(name: str, reading: Reading, interpreter: Interpreter, scene: Scene, memory: Memory, *, deep: bool) -> Part:
    """Return the part of `detail` that holds proven operators and dtypes: asked where `deep`, else what is kept."""
    framework, target, folder = _FRAMEWORKS[name], reading.target, memory.folder
    nothing: Part = {"ops": {}, "ops_device": None, "op_errors": {}}
    child = framework.ops
    if child is None or target is None:
        return nothing
    key = memory.key(f"{name} ops on {target.device}")
    if not deep:
        kept = cached(folder, key) if folder is not None and memory.use else None
        return kept["values"] if kept else nothing

    def ask(arguments: Sequence[str], limit: float) -> Answer:
        env = _environment(scene)
        return scene.system.child(child, arguments=arguments, python=interpreter.path, limit=limit, env=env)

    proven = prove(name, target, ask, scene.notes)
    found = {
        "ops": proven.ops, "ops_device": target.device, "op_errors": proven.errors, "ops_memory": proven.memory
    }  # fmt: skip
    if folder is not None and proven.ops:
        keep(folder, key, {"values": found, "errors": {}, "elapsed_ms": 0})
    return found


def _entry(name: str, path: str, answer: Answer | None, detail: Part | None = None, *, cached: bool = False) -> Part:
    """Return one entry of `frameworks`; without an answer the framework was not asked."""
    return {
        "name": name,
        "version": text(answer.values.get("version")) if answer else None,
        "python": path,
        "elapsed_ms": answer.outcome.elapsed_ms if answer else 0,
        "status": status_of(answer) if answer else "not_probed",
        "signal": answer.outcome.signal if answer else None,
        "cached": cached,
        "detail": detail or {},
    }
