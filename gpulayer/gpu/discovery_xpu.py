"""Intel's GPUs, which PyTorch alone lists. Reported, and demanded by no job. SHIPPED."""

from __future__ import annotations

import re

from gpulayer.gpu.discovery_report import Part, Scene, Target, new_device, size, text
from gpulayer.gpu.discovery_system import Answer


def add_xpu_devices(answer: Answer, scene: Scene) -> tuple[list[str], list[Target]]:
    """Add the devices that torch.xpu lists; return the capability where one computed rightly, and the devices."""
    worked, targets = False, []
    keys = [
        key for key, value in answer.values.items() if re.fullmatch(r"xpu:\d{1,3}", key) and isinstance(value, dict)
    ]
    for key in keys:
        device = _device(int(key[4:]), answer.values[key], answer.values.get(f"{key}.free"), scene)
        worked = _judge(key, device, answer, scene) or worked
        targets.append(Target(key, device["id"]))
        scene.devices.append(device)
    return ["torch.xpu"] if worked else [], targets


def _device(index: int, properties: Part, free: object, scene: Scene) -> Part:
    uuid, total = text(properties.get("uuid")), size(properties.get("total_memory"))
    own = f"xpu:{uuid}" if uuid and re.fullmatch(r"[\w-]{1,64}", uuid) else f"xpu:{index}"
    integrated = properties.get("integrated")
    if size(free) is None:
        scene.notes.add("xpu_memory_unknown", own, "The GPU does not tell how much of its memory is free.")
    return new_device(
        id=own,
        accelerator="xpu",
        index=index,
        name=text(properties.get("name")),
        vendor="Intel",
        uuid=uuid,
        memory_kind={True: "unified", False: "dedicated"}.get(integrated) if isinstance(integrated, bool) else None,
        memory_bytes=scene.host["memory_bytes"] if integrated is True else total,
        usable_memory_bytes=total,
        usable_source="torch" if total is not None else None,
        free_memory_bytes=size(free),
        free_source="torch" if size(free) is not None else None,
        driver_version=text(properties.get("driver_version")),
        select_env={"ONEAPI_DEVICE_SELECTOR": f"level_zero:{index}"},
        health="ok",
    )


def _judge(key: str, device: Part, answer: Answer, scene: Scene) -> bool:
    """Say whether the device computed rightly; where it did not, note why and mark the device."""
    product, error = answer.values.get(f"{key}.product"), answer.errors.get(f"{key}.product")
    if product == "wrong":
        scene.notes.add("xpu_wrong_result", device["id"], "The GPU computed a wrong product: do not trust its results.")
    elif error is not None:
        scene.notes.add("xpu_kernel_failed", device["id"], "Using the GPU through PyTorch fails.", error)
    if product == "wrong" or error is not None:
        device["health"] = "degraded"
    return product == "ok"
