"""GPUlayer from Python: declare, probe, plan and apply. docs/sdk.md has an example.

    inventory = gpulayer.load_inventory("inventory.yaml")
    jobs = gpulayer.load_jobs("jobs.yaml")
    plan = await gpulayer.plan(jobs, inventory)
    async for event in gpulayer.apply(plan, jobs, inventory):
        print(event.event, event.job)

Everything is imported when it is first used: hosts import this package too, and have nothing but a Python >= 3.9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulayer.errors import GpulayerError as GpulayerError

__version__ = "0.1.0"

_HOME = {
    "Inventory": "spec.inventory",
    "Host": "spec.inventory",
    "load_inventory": "spec.inventory",
    "local_inventory": "spec.inventory",
    "JobSet": "spec.jobs",
    "JobSpec": "spec.jobs",
    "IndependentJob": "spec.jobs",
    "DistributedJob": "spec.jobs",
    "ResourceRequest": "spec.jobs",
    "load_jobs": "spec.jobs",
    "Plan": "placement.plan",
    "GpulayerError": "errors",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562
    if name not in _HOME:
        raise AttributeError(f"module 'gpulayer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"gpulayer.{_HOME[name]}"), name)
