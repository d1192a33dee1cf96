"""What PyTorch's answers mean: its entry, capabilities, notes, and what it knows of the devices. SHIPPED.

`torch.mps` and its kin are given only for a product that the device just computed rightly. A ROCm build answers to
`torch.cuda`; its devices are `rocm` and never `cuda`.
"""

from __future__ import annotations

import re

from gpulayer.gpu.discovery_notes import Notes
from gpulayer.gpu.discovery_report import Part, Reading, Scene, Target, flag, new_device, size, text, texts
from gpulayer.gpu.discovery_system import Answer
from gpulayer.gpu.discovery_xpu import add_xpu_devices

_COLLECTIVE = ("gloo", "nccl", "xccl")
_FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
_WATERMARKS = ("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO")
_MPS_ENVIRONMENT = (_FALLBACK, *_WATERMARKS)  # what changes the meaning of everything else about MPS

_BUSY = re.compile(r"out of memory|busy", re.IGNORECASE)
_NO_KERNEL = re.compile(r"no kernel image|not compatible|invalid device function", re.IGNORECASE)
_LEAST_MACOS = re.compile(r"mac\s?os\D{0,20}(\d{2}(?:\.\d{1,2})?)", re.IGNORECASE)
_DRIVER_OLD = re.compile(r"driver.*too old", re.IGNORECASE | re.DOTALL)


def torch_settled(answer: Answer, devices: list[Part]) -> bool:
    """Say whether PyTorch will answer the same next time: all worked that could.

    A GPU that was busy or a Mac's session without Metal is asked again.
    """
    values = answer.values
    products = [key for key in (*values, *answer.errors) if key.endswith("product")]
    expected = any(device["accelerator"] == "cuda" for device in devices) and bool(values.get("cuda"))
    return (
        all(values.get(key) == "ok" for key in products)
        and values.get("mps_built") == values.get("mps_available")
        and bool(values.get("cuda_available") or not expected)
    )


def read_torch(answer: Answer, scene: Scene) -> Reading:
    """Return what PyTorch can do here; adds notes, and to the devices what it knows of them."""
    values = answer.values
    if "missing" in answer.errors:
        scene.notes.add("torch_not_installed", "torch", "PyTorch is not installed in the probed interpreter.")
    elif (error := answer.errors.get("import")) is not None:
        scene.notes.add("torch_import_failed", "torch", "PyTorch cannot be imported.", error)
    capabilities = []
    targets: list[Target] = []
    usable = None
    if "version" in values:
        usable = _mps(answer, scene)
        if values.get("mps_available") is True:
            targets += [Target("mps", device["id"]) for device in scene.devices if device["accelerator"] == "mps"]
        if usable:
            capabilities.append("torch.mps")
        for found, devices in (_cuda(answer, scene), add_xpu_devices(answer, scene)):
            capabilities += found
            targets += devices
    if values.get("cpu_product") == "ok":
        capabilities.append("torch")
        capabilities += [f"torch.distributed.{name}" for name in _COLLECTIVE if values.get(name) is True]
        targets.append(Target("cpu", "cpu:0"))
    environ = scene.system.environ
    detail: Part = {
        **{key: text(values.get(key)) for key in ("cuda", "hip", "xpu")},
        **{key: flag(values.get(key)) for key in ("mps_built", "mps_available")},
        "mps_usable": usable,
        "mps_environment": {name: environ[name][:200] for name in _MPS_ENVIRONMENT if name in environ},
        "arch_list": texts(values.get("arch_list")),
        **{key: flag(values.get(key)) for key in _COLLECTIVE},
    }
    return Reading(detail, capabilities, targets[0] if targets else None)


def _mps(answer: Answer, scene: Scene) -> bool | None:
    """Return whether MPS computes rightly; None where it was not found out."""
    notes, values = scene.notes, answer.values
    if scene.system.platform != "darwin":
        notes.add("not_macos", "torch", "MPS is the Apple GPU's; this host does not run macOS.")
        return False
    _mps_environment(scene)
    if values.get("mps_built") is False:
        notes.add("mps_not_built", "torch", "This PyTorch was built without MPS.")
        return False
    if values.get("mps_built") and values.get("mps_available") is False:
        _mps_unavailable(answer, scene)
        return False
    device = next((device for device in scene.devices if device["accelerator"] == "mps"), None)
    if device is not None and device["usable_memory_bytes"] is None and size(values.get("mps_memory")):
        device.update(usable_memory_bytes=values["mps_memory"], usable_source="torch")
    product, error = values.get("mps_product"), answer.errors.get("mps_product")
    if product == "wrong":
        notes.add("mps_wrong_result", "torch", "MPS computed a wrong product: do not trust this GPU's results.")
    elif error is not None:
        notes.add("mps_alloc_failed", "torch", "MPS is available, and using it fails.", error)
    control = flag(values.get("mps_control"))
    if product == "ok" and control is False:
        message = "float64 worked on mps, which has none: the CPU computed instead."
        notes.add("cpu_fallback_suspected", device["id"] if device else "torch", message)
    if device is not None and (product == "wrong" or error is not None):
        device["health"] = "degraded"
    if product == "ok":
        return control
    return False if product is not None or error is not None else None


def _mps_unavailable(answer: Answer, scene: Scene) -> None:
    """Say why where it is sure: PyTorch names the macOS that it needs, whatever the cause really is."""
    least = _LEAST_MACOS.search(answer.errors.get("mps_refusal", ""))
    host = _version(scene.host["os_version"] or "")
    if least is not None and host is not None and host < (_version(least[1]) or host):
        message = f"This PyTorch needs macOS {least[1]} for MPS; the host has {scene.host['os_version']}."
        scene.notes.add("macos_too_old_for_torch", "torch", message)
    else:
        scene.notes.add("mps_built_unavailable", "torch", "PyTorch was built with MPS, and MPS is not available.")


def _version(written: str) -> tuple[int, ...] | None:
    found = re.match(r"\d{1,4}(\.\d{1,4})*", written)
    return tuple(int(part) for part in found[0].split(".")) if found else None


def _mps_environment(scene: Scene) -> None:
    environ = scene.system.environ
    if environ.get(_FALLBACK, "0") not in {"", "0"}:
        message = f"{_FALLBACK} is set on the host: operators that MPS lacks run on the CPU there."
        scene.notes.add("mps_fallback_enabled", "torch", message)
    if any(name in environ for name in _WATERMARKS):
        scene.notes.add("mps_watermark_changed", "torch", "The host's environment changes how much memory MPS takes.")


def _cuda(answer: Answer, scene: Scene) -> tuple[list[str], list[Target]]:
    """Return the capabilities of torch.cuda, under the name of the accelerator behind it, and its devices."""
    notes, values = scene.notes, answer.values
    accelerator = "rocm" if values.get("hip") else "cuda"
    present = any(device["accelerator"] == accelerator for device in scene.devices)
    if accelerator == "rocm":
        notes.add("rocm_reports_as_cuda", "torch", "This PyTorch answers to torch.cuda through ROCm.")
    elif present and not values.get("cuda"):
        notes.add("torch_cpu_build", "torch", "There is an NVIDIA GPU, and this PyTorch was built for CPUs only.")
    elif present and values.get("cuda_available") is False:
        _unavailable(values, notes)
    worked, targets = False, []
    for key in [key for key in values if re.fullmatch(r"cuda:\d{1,3}", key) and isinstance(values[key], dict)]:
        device = _join(int(key[5:]), values[key], accelerator, values, scene)
        worked = _judge(key, device, answer, notes) or worked
        targets.append(Target(key, device["id"]))
    return [f"torch.{accelerator}"] if worked else [], targets


def _unavailable(values: Part, notes: Notes) -> None:
    warnings = " ".join(texts(values.get("cuda_warnings")))
    if _DRIVER_OLD.search(warnings):
        notes.add("driver_too_old", "torch", "The NVIDIA driver is too old for this PyTorch's CUDA.", warnings)
    else:
        message = "PyTorch was built with CUDA, there is a GPU, and CUDA is not available."
        notes.add("cuda_built_unavailable", "torch", message, warnings)


def _judge(key: str, device: Part, answer: Answer, notes: Notes) -> bool:
    """Say whether the device computed rightly; where it did not, note why and mark the device."""
    product, error = answer.values.get(f"{key}.product"), answer.errors.get(f"{key}.product")
    if product == "wrong":
        notes.add("cuda_wrong_result", device["id"], "The GPU computed a wrong product: do not trust its results.")
        device["health"] = "degraded"
    elif error is not None and _NO_KERNEL.search(error):
        message = "This PyTorch has no code for the GPU's architecture."
        notes.add("gpu_arch_unsupported", device["id"], message, error)
    elif error is not None:
        notes.add("cuda_kernel_failed", device["id"], "Using the GPU through PyTorch fails.", error)
        if not _BUSY.search(error):
            device["health"] = "degraded"
    return product == "ok"


def _join(index: int, properties: Part, accelerator: str, values: Part, scene: Scene) -> Part:
    """Return the device that torch means, brought up to date; one that nothing else listed is added."""
    device = _match(index, properties, accelerator, values, scene.devices)
    if device is None:
        device = _unlisted(index, properties, accelerator)
        scene.devices.append(device)
    total = size(properties.get("total_memory"))
    if device["parent_id"] is None and properties.get("is_integrated") == 1:
        _as_unified(device, scene)
    elif properties.get("is_integrated") == 0 and device["memory_kind"] is None:
        device["memory_kind"] = "dedicated"
        device["memory_bytes"] = device["memory_bytes"] or total
    if total is not None:
        device.update(usable_memory_bytes=total, usable_source="torch")
    if accelerator == "rocm":
        device["architecture"] = text(properties.get("gcnArchName"))
    return device


def _match(index: int, properties: Part, accelerator: str, values: Part, devices: list[Part]) -> Part | None:
    """Find torch's device by UUID, then by PCI address, and by its index only where both list equally many."""
    own = [device for device in devices if device["accelerator"] == accelerator]
    uuid = str(properties.get("uuid")).lower()
    domain, bus, slot = (properties.get(f"pci_{part}_id") for part in ("domain", "bus", "device"))
    known = isinstance(domain, int) and isinstance(bus, int) and isinstance(slot, int)
    pci = f"{domain:04x}:{bus:02x}:{slot:02x}.0" if known else None
    for device in own:
        if device["uuid"] and device["uuid"].lower().partition("-")[2] == uuid.removeprefix("gpu-"):
            return device
    for device in own:
        if device["parent_id"] is None and pci is not None and device["pci_bus_id"] == pci:
            return device
    if ("uuid" not in properties or accelerator == "rocm") and len(own) == values.get("cuda_count"):
        return own[index]
    return None


def _unlisted(index: int, properties: Part, accelerator: str) -> Part:
    uuid = text(properties.get("uuid"))
    own = f"GPU-{uuid}" if uuid and accelerator == "cuda" else None
    major, minor = properties.get("major"), properties.get("minor")
    variable = "CUDA_VISIBLE_DEVICES" if accelerator == "cuda" else "HIP_VISIBLE_DEVICES"
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if accelerator == "cuda" else {}
    return new_device(
        id=own or f"{accelerator}:{index}",
        accelerator=accelerator,
        index=index,
        name=text(properties.get("name")),
        vendor="NVIDIA" if accelerator == "cuda" else "AMD",
        compute_capability=f"{major}.{minor}" if accelerator == "cuda" and isinstance(major, int) else None,
        uuid=own,
        select_env={variable: own or str(index), **order},
        health="ok",
    )


def _as_unified(device: Part, scene: Scene) -> None:
    """Make a device that torch calls integrated share the host's memory, whatever figure the driver gave."""
    if device["memory_kind"] == "dedicated":
        scene.notes.add(
            "memory_carveout_ignored",
            device["id"],
            "The GPU shares the host's memory; the figure that its driver gives is a part set aside of it.",
        )
    available = scene.host["memory_available_bytes"]
    device.update(
        memory_kind="unified",
        memory_bytes=scene.host["memory_bytes"],
        free_memory_bytes=available,
        free_source="host" if available is not None else None,
    )
