"""NVIDIA GPUs: NVML in a child first, else nvidia-smi; not both where the driver is in trouble. SHIPPED.

Kinds of memory: CUDA's driver says whether a device shares the host's (`discovery_cuda`). Where it does not answer a
number is dedicated; no number on a device that is addressed through ATS, or on a Tegra, is unified; no number on
anything else is unknown, since a lost GPU looks the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpulayer.gpu.discovery_cuda import CudaDevice, ask_cuda, count_device_memory, pci_address
from gpulayer.gpu.discovery_notes import Notes
from gpulayer.gpu.discovery_report import Part, Scene, new_device, size, text
from gpulayer.gpu.discovery_system import System

NVML_LIMIT_S = 15.0
NVIDIA_SMI_LIMIT_S = 20.0

# What is there once a driver is loaded: bare metal, WSL, Jetson.
_DRIVER_SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu")
_TEGRA_SIGNS = ("/etc/nv_tegra_release", "/dev/nvhost-ctrl-gpu")

# On no PATH of a non-interactive session on WSL, nor in some containers.
_FOLDERS = ("/usr/bin", "/usr/lib/wsl/lib", "/usr/local/nvidia/bin", "/usr/local/cuda/bin")

_FIELDS = ("index", "uuid", "pci.bus_id", "memory.total", "memory.free", "driver_version")
_NEWER_FIELDS = ("compute_cap", "mig.mode.current")
_NEWEST_FIELDS = ("addressing_mode",)

_NO_PERMISSION, _NOT_LOADED, _LIBRARY_NOT_FOUND, _LOST, _RESET, _MISMATCH = 4, 9, 12, 15, 16, 18

# Our own sentence for each way in which the driver can be in trouble.
_TROUBLE = {
    "driver_not_loaded": "The NVIDIA driver is installed and not loaded.",
    "driver_library_mismatch": "The NVIDIA driver was updated; the old one still runs. Restart the host.",
    "gpu_lost": "A GPU has fallen off the bus or needs a reset; restart the host.",
    "mig_permission": "The driver does not let this user see all of a GPU.",
    "nvidia_smi_failed": "The NVIDIA driver did not list its GPUs.",
}
_CODES = {
    _NO_PERMISSION: "mig_permission",
    _NOT_LOADED: "driver_not_loaded",
    _LOST: "gpu_lost",
    _RESET: "gpu_lost",
    _MISMATCH: "driver_library_mismatch",
}
_TEXTS = (
    ("communicate with the nvidia driver", "driver_not_loaded"),
    ("version mismatch", "driver_library_mismatch"),
    ("gpu is lost", "gpu_lost"),
    ("unable to determine the device handle", "gpu_lost"),
    ("insufficient permissions", "mig_permission"),
)


class Gpu(NamedTuple):
    """One GPU in the form that both sources are brought to. Sizes are bytes.

    `used` is what processes have of the memory (NVML alone tells it); `processes` are (pid, bytes or None), None where
    they are not told.
    """

    uuid: str | None
    name: str | None
    pci: str | None = None
    memory: int | None = None
    free: int | None = None
    compute: str | None = None
    ats: bool = False
    mig: bool = False
    lost: bool = False
    used: int | None = None
    processes: tuple[tuple[int, int | None], ...] | None = None
    instances: tuple[Gpu, ...] = ()

    @property
    def own_id(self) -> str | None:
        """The id that the report has for it; None where only its place in the report names it."""
        return self.uuid or (f"pci:{self.pci}" if self.pci else None)


class Found(NamedTuple):
    """What a source told: its word in the report, its GPUs in any order, the driver's version, CUDA's version."""

    source: str
    gpus: tuple[Gpu, ...]
    driver: str | None
    cuda: str | None = None


def add_nvidia_devices(scene: Scene, *, folder: str | None = None, fresh: bool = False) -> None:
    """Add the CUDA devices in PCI order: GPUs, and in place of a GPU that is in MIG mode its instances.

    What CUDA's driver says is kept in `folder` (None: nowhere), and asked anew where `fresh`.
    """
    system, notes, host = scene.system, scene.notes, scene.host
    found = find_nvidia(system, notes)
    cuda: tuple[CudaDevice, ...] = ()
    if found.gpus or _is_tegra(system):
        known = [host["boot_id"], found.driver, [gpu.own_id for gpu in found.gpus]]
        cuda = ask_cuda(system, notes, known, folder=folder if host["boot_id"] else None, fresh=fresh)
        count_device_memory(system, notes, host, cuda)
    if not found.gpus and cuda:
        found = Found("cuda", tuple(_from_cuda(device) for device in cuda), None)
    for gpu in sorted(found.gpus, key=lambda gpu: gpu.pci or ""):
        parent = gpu.uuid or gpu.pci
        if gpu.mig:
            count = len(gpu.instances)
            notes.add("mig_enabled", parent or "nvidia", f"The GPU is in MIG mode: {count} instance(s) stand for it.")
        for part in gpu.instances if gpu.mig else (gpu,):
            scene.devices.append(_device(part, gpu, found, _told(part, gpu, cuda), scene))


def find_nvidia(system: System, notes: Notes) -> Found:
    """Return the GPUs that NVML lists, or nvidia-smi where there is no NVML; each once, however often it is listed."""
    asked = _ask_nvml(system, notes) if any(system.exists(sign) for sign in _DRIVER_SIGNS) else None
    found = _ask_nvidia_smi(system, notes) if asked is None else asked
    by_id = {gpu.own_id or place: gpu for place, gpu in enumerate(found.gpus)}
    return found._replace(gpus=tuple(by_id.values()))


def compute_processes(system: System) -> dict[str, list[tuple[int, int | None]]] | None:
    """Return what nvidia-smi lists as (pid, bytes or None) by the GPU's UUID; None where it does not tell."""
    tool = system.which("nvidia-smi", _FOLDERS)
    if tool is None:
        return None
    query = "--query-compute-apps=gpu_uuid,pid,used_gpu_memory"
    outcome = system.run([tool, query, "--format=csv,noheader,nounits"], limit=NVIDIA_SMI_LIMIT_S)
    if outcome.code != 0:
        return None
    found: dict[str, list[tuple[int, int | None]]] = {}
    for line in outcome.text.splitlines():
        uuid, pid, memory = ([cell.strip() for cell in line.split(",")] + ["", ""])[:3]
        if _uuid(uuid) is None or not pid.isdigit():
            return None  # an error in words, with status 0
        found.setdefault(uuid, []).append((int(pid), _mebibytes(memory)))
    return found


def _is_tegra(system: System) -> bool:
    """Say whether this is a Jetson: older ones have neither NVML nor nvidia-smi."""
    return any(map(system.exists, _TEGRA_SIGNS))


def _told(part: Gpu, gpu: Gpu, cuda: Sequence[CudaDevice]) -> CudaDevice | None:
    """Return what CUDA says of a GPU or MIG instance: the one with its UUID, else the one at a whole GPU's address."""
    uuid = (part.uuid or "").lower().partition("-")[2]
    for device in cuda:
        if uuid and device.uuid == uuid:
            return device
    return next((device for device in cuda if part is gpu and gpu.pci and device.pci == gpu.pci), None)


def _device(part: Gpu, gpu: Gpu, found: Found, told: CudaDevice | None, scene: Scene) -> Part:
    """Return the entry of one GPU, or of one MIG instance (`part`) of a GPU."""
    host, index = scene.host, len(scene.devices)
    own = part.own_id or f"cuda:{index}"
    integrated = told.integrated if told else None
    if integrated is None and part.memory is None and part is gpu and (gpu.ats or _is_tegra(scene.system)):
        integrated = True
    memory, free, source = part.memory, part.free, found.source
    if memory is None and told and integrated is False:
        memory, source = told.total, "cuda"
    usable: int | None = memory
    if integrated:
        if memory is not None:
            message = "The GPU shares the host's memory; the figure that its driver gives is a part set aside of it."
            scene.notes.add("memory_carveout_ignored", own, message)
        else:
            scene.notes.add("memory_not_reported", own, "The driver reports no memory of its own: it is the host's.")
        memory, free = host["memory_bytes"], host["memory_available_bytes"]
        usable, source = (told.total if told else None), "cuda"
    elif memory is None:
        message = "The driver reports no memory, and nothing says that the GPU shares the host's: it is unknown."
        scene.notes.add("memory_not_reported", own, message)
    kind = "unified" if integrated else "dedicated" if memory is not None or part is not gpu else None
    return new_device(
        id=own,
        accelerator="cuda",
        index=index,
        parent_id=None if part is gpu else gpu.uuid,
        name=part.name,
        vendor="NVIDIA",
        compute_capability=gpu.compute or (told.compute if told else None),
        uuid=part.uuid,
        pci_bus_id=gpu.pci,
        memory_kind=kind,
        memory_bytes=memory,
        usable_memory_bytes=usable,
        usable_source=source if usable is not None else None,
        free_memory_bytes=free,
        free_source=None if free is None else "host" if integrated else found.source,
        driver_version=found.driver,
        runtime_version=found.cuda,
        select_env={"CUDA_VISIBLE_DEVICES": part.uuid or str(index), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        health="unusable" if gpu.lost else "ok",
    )


def _add_trouble(notes: Notes, code: str, detail: str | None) -> None:
    notes.add(code, "nvidia", _TROUBLE[code], detail)


def _ask_nvml(system: System, notes: Notes) -> Found | None:
    """Return what NVML lists; None where nvidia-smi may know more, nothing where it would only hang or fail too."""
    answer = system.child("nvml_child", limit=NVML_LIMIT_S)
    notes.add_child("nvml", answer)
    code, values = answer.values.get("init"), answer.values
    if code != 0:
        if answer.outcome.timed_out:
            _add_trouble(notes, "nvidia_smi_failed", f"NVML: {answer.trouble}")
            return Found("nvml", (), None)
        if code not in _CODES:
            return None
        _add_trouble(notes, _CODES[code], f"NVML {code}")
        return Found("nvml", (), None)
    listed = [value for key, value in values.items() if key.startswith("gpu:") and isinstance(value, dict)]
    for value in listed:
        for failed, number in value["codes"].items():
            if number in _CODES:
                _add_trouble(notes, _CODES[number], f"NVML {number} ({failed})")
    cuda = values.get("cuda")
    version = f"{cuda // 1000}.{cuda % 1000 // 10}" if isinstance(cuda, int) else None
    return Found(
        "nvml",
        tuple(gpu for gpu in map(_from_nvml, listed) if gpu.uuid or gpu.pci),
        text(values.get("driver")),
        version,
    )


def _from_nvml(value: Part) -> Gpu:
    total, free = value.get("memory") or (None, None)
    used = value.get("used")
    return Gpu(
        uuid=_uuid(value.get("uuid")),
        name=text(value.get("name")),
        pci=pci_address(value.get("pci")),
        memory=size(total),
        free=free if size(total) and isinstance(free, int) and free >= 0 else None,
        compute=_version(value.get("compute")),
        ats=value.get("ats") is True,
        mig=value.get("mig") is True,
        lost=bool({_LOST, _RESET} & set(value["codes"].values())),
        used=used if isinstance(used, int) else None,
        processes=_processes(value.get("processes")),
        instances=tuple(_from_nvml(instance) for instance in value.get("instances") or ()),
    )


def _processes(listed: Any) -> tuple[tuple[int, int | None], ...] | None:  # noqa: ANN401  # from outside
    if not isinstance(listed, list):
        return None
    return tuple((pid, size(memory)) for pid, memory in listed)


def _ask_nvidia_smi(system: System, notes: Notes) -> Found:
    tool = system.which("nvidia-smi", _FOLDERS)
    if tool is None and _is_tegra(system):
        return Found("cuda", (), None)
    if tool is None:
        notes.add("nvidia_smi_not_found", "nvidia", "No NVIDIA driver was found.")
        return Found("nvidia-smi", (), None)
    for fields in (_FIELDS + _NEWER_FIELDS + _NEWEST_FIELDS, _FIELDS + _NEWER_FIELDS, _FIELDS):
        # The name comes last, so that it may hold commas.
        query = ",".join((*fields, "name"))
        command = [tool, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        outcome = system.run(command, limit=NVIDIA_SMI_LIMIT_S)
        if "not a valid field" not in (outcome.text + outcome.stderr.decode("utf-8", "replace")):
            break
    if outcome.timed_out:
        notes.add("nvidia_smi_timeout", "nvidia", "nvidia-smi hangs; restart the host if it stays so.")
        return Found("nvidia-smi", (), None)
    rows, other = [], []
    for line in outcome.text.splitlines():
        cells = [cell.strip() for cell in line.split(",", len(fields))]
        if len(cells) == len(fields) + 1 and cells[0].isdigit():
            rows.append(dict(zip((*fields, "name"), cells)))
        elif line.strip():
            other.append(line.strip())
    # Errors are printed on stdout too, some with status 0.
    if other or not rows or outcome.code != 0:
        words = " ".join(
            (*other, outcome.stderr.decode("utf-8", "replace"), outcome.error or f"exit code {outcome.code}")
        )
        code = next((code for phrase, code in _TEXTS if phrase in words.lower()), "nvidia_smi_failed")
        _add_trouble(notes, code, words)
    instances = _instances(system, tool) if any(row.get("mig.mode.current") == "Enabled" for row in rows) else {}
    gpus = tuple(_from_row(row, instances) for row in rows)
    return Found("nvidia-smi", gpus, next((row["driver_version"] for row in rows), None))


def _from_cuda(device: CudaDevice) -> Gpu:
    uuid = f"GPU-{device.uuid}" if device.uuid else None
    return Gpu(uuid=uuid, name=device.name, pci=device.pci, compute=device.compute)


def _from_row(row: dict[str, str], instances: dict[str, tuple[Gpu, ...]]) -> Gpu:
    uuid = _uuid(row["uuid"])
    memory = size(_mebibytes(row["memory.total"]))
    return Gpu(
        uuid=uuid,
        name=_known(row["name"].strip('"')),
        pci=pci_address(row["pci.bus_id"]),
        memory=memory,
        free=_mebibytes(row["memory.free"]) if memory else None,
        compute=_version(row.get("compute_cap")),
        ats=row.get("addressing_mode") == "ATS",
        mig=row.get("mig.mode.current") == "Enabled",
        lost="lost" in row["memory.total"].lower(),
        instances=instances.get(uuid or "", ()),
    )


def _instances(system: System, tool: str) -> dict[str, tuple[Gpu, ...]]:
    """Return the MIG instances by their GPU's UUID, as `nvidia-smi -L` lists them; their memory it does not tell."""
    found: dict[str, tuple[Gpu, ...]] = {}
    parent = ""
    for line in system.run([tool, "-L"], limit=NVIDIA_SMI_LIMIT_S).text.splitlines():
        uuid = _uuid((re.search(r"\(UUID: ([^)\s]+)\)", line) or [None, None])[1])
        if uuid is None:
            continue
        if uuid.startswith("GPU-"):
            parent = uuid
        else:
            found[parent] = (*found.get(parent, ()), Gpu(uuid=uuid, name=text(line.partition("Device")[0])))
    return found


def _known(cell: str | None) -> str | None:
    """Return a cell's text; None for the many ways in which nvidia-smi says that it does not know."""
    if cell is None or re.fullmatch(
        r"\[?(n/a|not supported|unknown error|insufficient permissions|.*lost)\]?", cell, re.IGNORECASE
    ):
        return None
    return None if cell in {"", "ERR!", "??", "[Requested functionality has been deprecated]"} else cell[:200]


def _mebibytes(cell: str) -> int | None:
    found = re.fullmatch(r"(\d{1,12})( MiB)?", cell)
    return int(found[1]) << 20 if found else None


def _uuid(value: Any) -> str | None:  # noqa: ANN401  # from outside
    return value if isinstance(value, str) and re.fullmatch(r"(GPU|MIG)-[0-9A-Za-z/-]{1,80}", value) else None


def _version(value: Any) -> str | None:  # noqa: ANN401
    return value if isinstance(value, str) and re.fullmatch(r"\d{1,3}\.\d{1,2}", value) else None
