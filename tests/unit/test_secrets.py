"""Values of secrets are checked before anything connects, and stand in nothing that is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulayer.errors import UsageError
from gpulayer.fleet.session import Fleet
from gpulayer.run.channel import Channel
from gpulayer.run.follow import Links, Reporter
from gpulayer.run.launch import Launcher, check_secrets
from gpulayer.run.store import Store
from gpulayer.spec.inventory import Inventory
from gpulayer.spec.jobs import IndependentJob


def test_a_secret_that_no_environment_takes_is_an_error_without_its_value() -> None:
    job = IndependentJob(name="a", command="true", secrets=("ONE",))
    check_secrets([job], {"ONE": "x" * (128 * 1024 - 5)})  # with ONE= and the NUL it is the most that Linux takes
    for value in ("x" * (128 * 1024 - 4), "\u00e4" * 64 * 1024, "x" * (3 << 20)):
        with pytest.raises(UsageError, match="the secret ONE of a has") as caught:
            check_secrets([job], {"ONE": value})
        assert value[:4] not in str(caught.value)
    many = IndependentJob(name="a", command="true", secrets=tuple(f"S{number}" for number in range(10)))
    with pytest.raises(UsageError, match="the secrets of a have"):
        check_secrets([many], dict.fromkeys(many.secrets, "x" * 120000))


def test_no_value_of_the_environment_is_in_what_a_launcher_shows(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        reporter = Reporter(store=store, channel=Channel())
        links = Links(fleet=Fleet(Inventory(hosts={})), reporter=reporter)
        launcher = Launcher(links=links, reporter=reporter, trees={}, environment={"TOKEN": "s3cr3t-value"})
        assert "s3cr3t" not in repr(launcher)
