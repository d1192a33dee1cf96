"""GPUlayer from Python: declare, probe, plan and apply. docs/sdk.md has an example.

    inventory = gpulayer.load_inventory(Path("inventory.yaml"))
    jobs = gpulayer.load_jobs(Path("jobs.yaml"))
    plan = await gpulayer.plan(jobs, inventory)
    async for event in gpulayer.apply(plan, jobs, inventory):
        print(event.event, event.job)

Everything is imported when it is first used: hosts import this package too, and have nothing but a Python >= 3.9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulayer.errors import GpulayerError as GpulayerError
    from gpulayer.errors import HostError as HostError
    from gpulayer.errors import InvalidDocumentError as InvalidDocumentError
    from gpulayer.errors import StalePlanError as StalePlanError
    from gpulayer.placement.plan import Plan as Plan
    from gpulayer.run.api import apply as apply
    from gpulayer.run.api import plan as plan
    from gpulayer.run.api import probe as probe
    from gpulayer.run.events import Event as Event
    from gpulayer.spec.inventory import Host as Host
    from gpulayer.spec.inventory import Inventory as Inventory
    from gpulayer.spec.inventory import load_inventory as load_inventory
    from gpulayer.spec.inventory import local_inventory as local_inventory
    from gpulayer.spec.jobs import Distributed as Distributed
    from gpulayer.spec.jobs import DistributedJob as DistributedJob
    from gpulayer.spec.jobs import IndependentJob as IndependentJob
    from gpulayer.spec.jobs import JobSet as JobSet
    from gpulayer.spec.jobs import JobSpec as JobSpec
    from gpulayer.spec.jobs import ResourceRequest as ResourceRequest
    from gpulayer.spec.jobs import load_jobs as load_jobs

__version__ = "0.1.0"

# Where each name lives; the imports above say the same to type checkers, and a test holds the two equal.
_HOMES = {
    "gpulayer.errors": ("GpulayerError", "HostError", "InvalidDocumentError", "StalePlanError"),
    "gpulayer.placement.plan": ("Plan",),
    "gpulayer.run.api": ("apply", "plan", "probe"),
    "gpulayer.run.events": ("Event",),
    "gpulayer.spec.inventory": ("Host", "Inventory", "load_inventory", "local_inventory"),
    "gpulayer.spec.jobs": (
        "Distributed",
        "DistributedJob",
        "IndependentJob",
        "JobSet",
        "JobSpec",
        "ResourceRequest",
        "load_jobs",
    ),
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562
    from importlib import import_module

    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'gpulayer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for names in _HOMES.values() for name in names)})
