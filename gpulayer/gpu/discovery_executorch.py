"""What ExecuTorch's answers mean: registered is told apart from usable. SHIPPED.

The registry of a wheel holds backends whose hardware no host has, and says of some that they are available there. So
`executorch.X` is given where X is registered, says that it is available, and needs what this host has; whatever else is
registered is listed unchanged and is no capability.
"""

from __future__ import annotations

from gpulayer.gpu.discovery_report import Part, Reading, Scene, texts
from gpulayer.gpu.discovery_system import Answer

# Backend of the registry: its capability, and the accelerators of which the host needs one (empty: any host).
_BACKENDS = {
    "XnnpackBackend": ("executorch.xnnpack", ()),
    "CoreMLBackend": ("executorch.coreml", ("mps",)),
    "MLXBackend": ("executorch.mlx", ("mps",)),
    "MetalBackend": ("executorch.metal", ("mps",)),
    "CudaBackend": ("executorch.cuda", ("cuda",)),
    "VulkanBackend": ("executorch.vulkan", ("cuda", "rocm", "xpu")),
    "OpenvinoBackend": ("executorch.openvino", ()),
}


def executorch_settled(answer: Answer, _devices: list[Part]) -> bool:
    """Say whether ExecuTorch will answer the same next time: its registry does not change."""
    return "registered" in answer.values


def read_executorch(answer: Answer, scene: Scene) -> Reading:
    """Return what ExecuTorch can do here; adds notes."""
    notes, values = scene.notes, answer.values
    error = answer.errors.get("import")
    if "missing" in answer.errors:
        notes.add("executorch_not_installed", "executorch", "ExecuTorch is not installed in the probed interpreter.")
    elif error is not None and values.get("torch") is False:
        message = "ExecuTorch needs PyTorch, which its package does not bring; install torch beside it."
        notes.add("executorch_needs_torch", "executorch", message, error)
    elif error is not None:
        notes.add("executorch_import_failed", "executorch", "ExecuTorch's runtime cannot be loaded.", error)
    registered = texts(values.get("registered"))
    present = {device["accelerator"] for device in scene.devices}
    usable = []
    for name in registered:
        if name not in _BACKENDS:
            continue
        capability, accelerators = _BACKENDS[name]
        if values.get(f"available:{name}") is True and (not accelerators or present.intersection(accelerators)):
            usable.append(capability)
        else:
            message = f"{name} is registered in ExecuTorch and cannot be used on this host."
            notes.add("executorch_backend_registered_unusable", name, message)
    capabilities = ["executorch", *usable] if registered else []
    return Reading({"registered": registered, "usable": sorted(usable)}, capabilities, None)
