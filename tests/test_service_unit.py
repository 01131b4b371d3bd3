"""The service's systemd unit: systemd accepts it, what it allows suffices, and nothing in it is there for nothing."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import command_line
import node_service
import pytest
from node_service import FULL, OTHER, OWNER, Service, kernel_id

from gres_mig import config, service
from gres_mig.simulator.admin import Node
from gres_mig.values import replace

UNIT = service.unit("/usr/bin/true serve")


def values(key: str) -> list[str]:
    """What the unit says for a key."""
    return re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)


CAPABILITIES = values("CapabilityBoundingSet")[0].split()


def bounded(capabilities: Sequence[str]) -> tuple[str, ...]:
    """What starts a process with only these, as systemd does."""
    bounding = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in capabilities)])
    return ("setpriv", f"--bounding-set={bounding}", "--inh-caps=-all", "--no-new-privs")


@pytest.fixture
def start(node: Node) -> Iterator[Callable[..., Service]]:
    node_service.need_root()
    node.configure(permission="administrator")
    with node_service.services(node, "in_use_wait = 0") as start:
        yield start


def device_of(node: Node) -> Path:
    """The GPU's device file, which a client of the GPU has open."""
    path = Path(node.store.folder) / "dev" / "nvidia0"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    path.chmod(0o666)
    return path


def make_an_instance(served: Service, device: Path) -> bool:
    """CAP_SYS_ADMIN: whom the driver takes for an administrator."""
    return served.ask("PUT", f"/v1/kernels/{kernel_id()}", FULL).status == 201


def see_who_holds_it(served: Service, device: Path) -> bool:
    """CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH: /proc/PID/fd of another user."""
    kernel = kernel_id()
    command_line.here("--node", served.folder, "allocate", "--owner", f"jupyter:0:{kernel}", "--memory", "8000")
    (instance,) = served.node.instances()
    command = [*node_service.user(OTHER), "sh", "-c", f"exec sleep 3600 < {device}"]
    with subprocess.Popen(command, env=node_service.PLAIN) as holder:
        command_line.until(lambda: Path(f"/proc/{holder.pid}/comm").read_text().strip() == "sleep")
        served.node.hold(instance.gpu, instance.id, 0, pid=holder.pid, listed=False)
        served.ask("DELETE", f"/v1/kernels/{kernel}")
        record = node_service.records(served.node)[0]
        holder.kill()
    return f"pid {holder.pid} sleep" in str(getattr(record, "stuck", ""))


def understand_a_container(served: Service, device: Path) -> bool:
    """CAP_SYS_PTRACE: /proc/PID/ns of another user."""
    into = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
    with node_service.callers(served.path) as starts:
        server, kernel = starts(*node_service.user(OWNER), *into), kernel_id()
        server.ask("PUT", f"/v1/kernels/{kernel}", FULL)
        return server.ask("POST", f"/v1/kernels/{kernel}/process", {"pid": server.own_pid}).status == 200


def make_a_device_node(served: Service, device: Path) -> bool:
    """CAP_MKNOD: what nvidia-modprobe does for a new instance, a child of the process that asks the driver."""
    code = "import os, stat, sys; os.mknod(sys.argv[1], 0o444 | stat.S_IFCHR, os.makedev(195, 200))"
    made = device.parent / "nvidia-cap1"
    words = [*bounded(_has(served)), node_service.SYSTEM_PYTHON, "-c", code, str(made)]
    subprocess.run(words, env=node_service.PLAIN, capture_output=True, check=False)
    return made.exists() and stat.S_ISCHR(made.stat().st_mode)


def _has(served: Service) -> list[str]:
    """The capabilities of the running service."""
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    bits = int(status.split("CapEff:")[1].split()[0], 16)
    numbers = {"CAP_DAC_READ_SEARCH": 2, "CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_MKNOD": 27}
    assert bits & ~sum(1 << number for number in numbers.values()) == 0
    return [name for name, number in numbers.items() if bits >> number & 1]


DOES = (make_an_instance, see_who_holds_it, understand_a_container, make_a_device_node)

FAILS: dict[str, set[Callable[[Service, Path], bool]]] = {
    "CAP_SYS_ADMIN": {make_an_instance},
    "CAP_SYS_PTRACE": {see_who_holds_it, understand_a_container},
    "CAP_DAC_READ_SEARCH": {see_who_holds_it},
    "CAP_MKNOD": {make_a_device_node},
}
"""What does not work without it."""


def test_the_capabilities_of_the_unit_suffice(start: Callable[..., Service], node: Node) -> None:
    served = start(before=bounded(CAPABILITIES)).ready()
    device, failed = device_of(node), []

    for does in DOES:
        failed += [] if does(served, device) else [does.__name__]
        node_service.clean(served)

    assert failed == []
    assert _has(served) == sorted(CAPABILITIES, key=_has(served).index)


@pytest.mark.parametrize(
    ("dropped", "does"),
    [(name, does) for name, lost in FAILS.items() for does in sorted(lost, key=lambda does: does.__name__)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_without_any_one_of_them_something_fails(
    start: Callable[..., Service], node: Node, dropped: str, does: Callable[[Service, Path], bool]
) -> None:
    served = start(before=bounded([name for name in CAPABILITIES if name != dropped])).ready()

    assert not does(served, device_of(node))


def test_every_capability_of_the_unit_is_tried() -> None:
    assert set(CAPABILITIES) == set(FAILS)
    assert set(DOES) == set().union(*FAILS.values())


def test_every_line_that_restricts_is_below_a_reason() -> None:
    lines = UNIT.partition("# Folders.")[2].partition("[Install]")[0].splitlines()
    named = [line.partition("=")[0] for line in lines if "=" in line and not line.startswith("#")]

    assert all(f"# {name}" in UNIT or f", {name}:" in UNIT for name in CAPABILITIES)
    assert {"ProtectSystem", "NoNewPrivileges", "RestrictAddressFamilies", "CapabilityBoundingSet"} <= set(named)
    # They would hide the GPUs, or the owners.
    assert {"PrivateDevices", "DevicePolicy", "ProtectClock", "ProtectProc", "PrivateUsers"}.isdisjoint(named)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not there to say")
    path = tmp_path / "gres-mig.service"
    path.write_text(UNIT)

    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)

    assert [line for line in done.stderr.splitlines() if "gres-mig" in line] == []


def test_the_folders_that_may_be_written_are_those_of_the_configuration() -> None:
    usual = config.defaults()

    elsewhere = service.unit("x", replace(usual, state_dir="/srv/gres mig", run_dir="/run/n1"))

    assert "StateDirectory=gres-mig" in UNIT
    assert "RuntimeDirectory=gres-mig" in UNIT
    assert service.unit("x", usual) == service.unit("x")
    assert "StateDirectory" not in elsewhere
    assert "ReadWritePaths=-/srv/gres\\x20mig" in elsewhere
    assert "ReadWritePaths=-/run/n1" in elsewhere


@pytest.mark.parametrize(
    ("lines", "added"),
    [
        ("", set()),
        ('slices = "*"', {"CAP_CHOWN", "CAP_SETUID", "CAP_SETGID"}),
        ('dcgm_sighup = "dcgm-exporter.service"', {"CAP_KILL"}),
    ],
)
def test_what_a_configuration_needs_besides_is_allowed_with_its_reason(node: Node, lines: str, added: set[str]) -> None:
    node_service.configure(node, lines)

    text = service.unit("x", node_service.settings_of(node))

    allowed = re.findall(r"^CapabilityBoundingSet=(.*)$", text, re.MULTILINE)[0].split()
    assert set(allowed) == {*CAPABILITIES, *added}
    assert all(f"# {name}: " in text for name in added)


def test_setup_shows_and_writes_the_unit_with_a_socket(node: Node) -> None:
    folder = node.store.folder
    path = Path(folder) / "systemd" / "gres-mig.service"

    shown = command_line.here("--node", folder, "setup", "--service")
    before = path.exists()
    written = command_line.here("--node", folder, "setup", "--service", "--write", "--json")
    again = command_line.here("--node", folder, "setup", "--service")

    assert "CapabilityBoundingSet=" in shown.out
    assert not before
    text = path.read_text()
    assert re.search(rf"^ExecStart=.*--node {re.escape(os.fspath(folder))} serve$", text, re.MULTILINE)
    assert f"ReadWritePaths=-{folder}" in text
    assert {file["path"]: file["state"] for file in files(written.plain)}[str(path)] == "new"
    assert f"{path}: unchanged" in again.out


def files(plain: dict[str, Any]) -> list[dict[str, Any]]:
    """The files that setup says it wrote."""
    found: list[dict[str, Any]] = plain["files"]
    return found
