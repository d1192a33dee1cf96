"""What MLX's answers mean: its entry, capabilities, notes, and what it knows of the devices. SHIPPED.

`mlx.metal` and `mlx.cuda` are given only for a product that the GPU just computed rightly, under the name of the
backend that says it is available. `mlx.distributed.*` mean that MLX says a backend can be used; joining a group of one
is no proof (`mx.distributed.init()` gives one where nothing was launched), and none of it tells of the network.
"""

from __future__ import annotations

import re

from gpulayer.gpu.discovery_report import Part, Reading, Scene, Target, flag, size, text
from gpulayer.gpu.discovery_system import Answer

# A backend's native library that is not there: `mlx` without `mlx[cpu]`, or `mlx-cpu` alone.
_NO_BACKEND = re.compile(r"libmlx|mlx\.core|mlx\.metallib", re.IGNORECASE)
_ACCELERATORS = {"metal": "mps", "cuda": "cuda"}
_COLLECTIVE = ("ring", "jaccl", "nccl", "mpi")


def mlx_settled(answer: Answer, devices: list[Part]) -> bool:
    """Say whether MLX will answer the same next time: what is there works."""
    wanted = any(device["accelerator"] in _ACCELERATORS.values() for device in devices)
    gpu = answer.values.get("gpu_product")
    return answer.values.get("cpu_product") == "ok" and gpu == ("ok" if wanted else None)


def read_mlx(answer: Answer, scene: Scene) -> Reading:
    """Return what MLX can do here; adds notes, and to the Apple GPU what MLX knows of its memory."""
    notes, values = scene.notes, answer.values
    if "missing" in answer.errors:
        notes.add("mlx_not_installed", "mlx", "MLX is not installed in the probed interpreter.")
    elif (error := answer.errors.get("import")) is not None:
        if _NO_BACKEND.search(error):
            message = "MLX is there without a backend; install mlx[cpu], mlx[cuda12] or mlx[cuda13], on a Mac mlx."
            notes.add("mlx_backend_missing", "mlx", message, error)
        else:
            notes.add("mlx_import_failed", "mlx", "MLX cannot be imported.", error)
    capabilities = []
    known = values["gpu"] if isinstance(values.get("gpu"), dict) else {}
    target = None
    if values.get("cpu_product") == "ok":
        capabilities += ["mlx", "mlx.cpu"]
        capabilities += [f"mlx.distributed.{name}" for name in _COLLECTIVE if values.get(name) is True]
        target = Target("cpu", "cpu:0")
    elif "cpu_product" in values:
        notes.add("mlx_wrong_result", "cpu:0", "MLX computed a wrong product on the CPU.")
    backend = next((name for name in _ACCELERATORS if values.get(name) is True), None)
    present = [device for device in scene.devices if device["accelerator"] in _ACCELERATORS.values()]
    if backend is not None:
        device = _device(backend, scene)
        target = Target("gpu", device["id"]) if device else target
        capabilities += _gpu(backend, device, known, answer, scene)
    elif present and "cpu_product" in values:
        notes.add("mlx_no_gpu", "mlx", f"MLX sees no GPU, and the host has {present[0]['name'] or present[0]['id']}.")
    detail: Part = {
        **{key: flag(values.get(key)) for key in _ACCELERATORS},
        "gpu_usable": values["gpu_product"] == "ok" if "gpu_product" in values else None,
        "device_name": text(known.get("device_name")),
        "architecture": text(known.get("architecture")),
        "distributed": [name for name in _COLLECTIVE if values.get(name) is True],
    }
    return Reading(detail, capabilities, target)


def _device(backend: str, scene: Scene) -> Part | None:
    """Return the device that MLX computes on: its default GPU is the first."""
    return next((device for device in scene.devices if device["accelerator"] == _ACCELERATORS[backend]), None)


def _gpu(backend: str, device: Part | None, known: Part, answer: Answer, scene: Scene) -> list[str]:
    """Return the GPU's capability where it computed rightly; else note why not and mark the device."""
    values, notes = answer.values, scene.notes
    product, error = values.get("gpu_product"), answer.errors.get("gpu_product")
    subject = device["id"] if device else "mlx"
    if product == "wrong":
        notes.add("mlx_wrong_result", subject, "The GPU computed a wrong product: do not trust its results.")
    elif error is not None:
        notes.add("mlx_gpu_failed", subject, "MLX says that its GPU is available, and using it fails.", error)
    if device is not None and (product == "wrong" or error is not None):
        device["health"] = "degraded"
    if device is not None and backend == "metal":
        usable = size(known.get("max_recommended_working_set_size"))
        if device["usable_memory_bytes"] is None and usable is not None:
            device.update(usable_memory_bytes=usable, usable_source="mlx")
        device["max_buffer_bytes"] = device["max_buffer_bytes"] or size(known.get("max_buffer_length"))
        device["architecture"] = device["architecture"] or text(known.get("architecture"))
    return [f"mlx.{backend}"] if product == "ok" else []
