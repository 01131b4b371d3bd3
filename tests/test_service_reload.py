"""The configuration in force: read again, refused, and shown to whoever looks at the node."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import command_line
import node_service
import pytest
from command_line import until
from node_service import FULL, Service, kernel_id

from gres_mig import __version__, presence
from gres_mig.simulator.admin import Node
from gres_mig.values import replace


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with node_service.shared() as service:
        yield service


@pytest.fixture
def served(running: Service) -> Iterator[Service]:
    yield running
    running.reload("")
    node_service.clean(running)


def test_reload_puts_a_changed_file_into_force_and_says_so(served: Service) -> None:
    before = served.ask("GET", "/v1/service").plain["config"]
    node_service.configure(served.node, "user_instances = 3")

    stale = command_line.here("--node", served.folder, "status")
    doctor = command_line.here("--node", served.folder, "doctor")
    answer = command_line.here("--node", served.folder, "reload", "--json")
    after = served.ask("GET", "/v1/service").plain
    fresh = command_line.here("--node", served.folder, "status", "--json").plain["service"]
    well = command_line.here("--node", served.folder, "doctor")

    assert "which changed since: gres-mig reload" in stale.flat
    assert "changed since the service read it" in doctor.flat
    assert answer.plain["sha256"] == after["config"]["sha256"] != before["sha256"]
    assert after["limits"]["user_instances"] == 3
    assert (fresh["version"], fresh["config"]["sha256"]) == (__version__, after["config"]["sha256"])
    assert "of this version, with this configuration" in well.flat


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('placement = "spred"', r"config.toml:2: placement: found \"spred\".*"),
        ('state_dir = "elsewhere"', r".*state_dir cannot change while the service runs; run: systemctl restart .*"),
    ],
)
def test_reload_refuses_a_wrong_file_and_the_old_one_stays(served: Service, line: str, said: str) -> None:
    before = served.ask("GET", "/v1/service").plain["config"]
    node_service.configure(served.node, line)

    answer = command_line.here("--node", served.folder, "reload")
    served.process.send_signal(signal.SIGHUP)
    until(lambda: served.ask("GET", "/v1/service").plain["config"]["error"])
    after = served.ask("GET", "/v1/service").plain["config"]
    made = served.ask("PUT", f"/v1/kernels/{kernel_id()}", FULL)

    assert answer.code == 4
    assert re.search(said, answer.err)
    assert (after["sha256"], after["loaded"]) == (before["sha256"], before["loaded"])
    assert re.search(said, after["error"])
    assert made.status == 201


def test_reload_without_a_service_says_how_to_start_it(node: Node) -> None:
    node_service.configure(node, "")

    answer = command_line.here("--node", node.store.folder, "reload")

    assert answer.code == 2
    assert answer.err == "gres-mig: no service runs on this node; run: systemctl start gres-mig\n"


def test_doctor_says_when_the_service_is_of_another_version(served: Service) -> None:
    run_dir = str(served.folder / "run")
    here = presence.running(run_dir)
    assert here is not None
    presence.tell(run_dir, replace(here, version="0.0.1"))

    doctor = command_line.here("--node", served.folder, "doctor")
    status = command_line.here("--node", served.folder, "status")

    assert f"is gres-mig 0.0.1, installed is {__version__}" in doctor.flat
    assert "service 0.0.1 (installed is" in status.flat
