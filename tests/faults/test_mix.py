"""Chance finds what nobody thought of. A seed tells the whole story; `make faults` plays many and long ones."""

from __future__ import annotations

import pytest

from tests.faults.mix import a_mix, kill_points
from tests.faults.scene import Scene


@pytest.mark.parametrize("seed", range(4))
async def test_wherever_controller_and_host_fail_each_run_starts_at_most_once(scene: Scene, seed: int) -> None:
    await kill_points(scene, seed=seed)


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_mix_of_faults_leaves_only_true_ends(scene: Scene, seed: int) -> None:
    """F50."""
    await a_mix(scene, seed=seed, seconds=6, jobs=8)
