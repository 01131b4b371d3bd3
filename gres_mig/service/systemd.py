"""The service as systemd sees it: its unit, and how it is told that all is well."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from gres_mig import log
from gres_mig.config import RUN_DIR, STATE_DIR, defaults

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gres_mig.models import Settings

NAME = "gres-mig.service"

_UNIT = """\
# Written by: gres-mig setup
[Unit]
Description=gres-mig: give back what crashes and ended owners left, serve notebook servers, wake jobs that wait
After=local-fs.target gres-mig-boot.service munge.service
# Only an order: allocating and giving back work without this service, and it works without slurmd.
Before=slurmd.service

[Service]
Type=notify
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
# What is in a driver call is not killed with the service; it is left to end by itself.
KillMode=process
Restart=always
RestartSec=5
TimeoutStartSec=60
WatchdogSec=120

# Folders. Only these are written, and /dev, where the driver's tools make the nodes of an instance.
ProtectSystem=strict
{folders}
# ExecStart may be below a home folder; nothing there is written.
ProtectHome=read-only

# Capabilities. The service is root, for the driver's files and its own are root's; of root's powers it has these.
# CAP_SYS_ADMIN: the driver takes only who has it for an administrator, who may make and destroy instances.
# CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH: to see who still has an instance open (/proc/PID/fd of every user), and which
#   process a notebook server in a container means (/proc/PID/ns).
# CAP_MKNOD: nvidia-modprobe, which the driver's library starts, makes the device nodes of a new instance.
{reasons}CapabilityBoundingSet={capabilities}

# Sandbox. What a driver, its tools and Slurm's commands never need.
# No setuid program gives more than the above.
NoNewPrivileges=yes
# The driver is loaded before (gres-mig-boot.service is ordered after it), never by the service.
ProtectKernelModules=yes
# Nothing is written to /proc/sys or /sys: MIG mode is changed by other commands, and through the driver.
ProtectKernelTunables=yes
ProtectKernelLogs=yes
ProtectControlGroups={cgroups}
ProtectHostname=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictNamespaces=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
# Unix: its socket, systemd, munge, step daemons. Internet: slurmctld, and the metrics on loopback. Netlink: the
# resolver of the C library asks it for this host's addresses.
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
# Not set, for it would hide the GPUs: PrivateDevices, DevicePolicy, and ProtectClock, which brings a DevicePolicy.
# Not set, for owners and holders are other users' processes: PrivateUsers, ProtectProc.

[Install]
WantedBy=multi-user.target
"""


_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_MKNOD")

_FOR_SLICES = {
    "CAP_CHOWN": "a slice's file is its owner's",
    "CAP_SETUID": "the limit of a slice is proved by a process of its owner's",
    "CAP_SETGID": "the same, in its owner's group",
}
_FOR_SIGNALS = {"CAP_KILL": 'dcgm_sighup, and over_grant = "end", are signals to processes of others'}


def unit(command: str, settings: Settings | None = None) -> str:
    """The text of gres-mig.service; `command` is a command line as systemd reads it.

    What a configuration of only MIG instances never does is not allowed: write it again when that changes.
    """
    now = settings or defaults()
    more: dict[str, str] = {}
    if now.slicing.gpus:
        more.update(_FOR_SLICES)
    if now.dcgm_sighup or (now.slicing.gpus and now.slicing.over_grant == "end"):
        more.update(_FOR_SIGNALS)
    return _UNIT.format(
        command=command,
        folders="\n".join(_folders(now)),
        reasons="".join(f"# {name}: {reason}.\n" for name, reason in more.items()),
        capabilities=" ".join([*_CAPABILITIES, *more]),
        # The driver's own limits are of a cgroup, which is made for a slice.
        cgroups="no" if now.slicing.gpus and now.slicing.driver_limit else "yes",
    )


def _folders(settings: Settings) -> Iterator[str]:
    # Made by systemd, for in a read-only tree the service could not.
    if settings.state_dir == STATE_DIR:
        yield from ("StateDirectory=gres-mig", "StateDirectoryMode=0700")
    if settings.run_dir == RUN_DIR:
        yield "RuntimeDirectory=gres-mig"
        yield "# The locks and what is published outlive the service."
        yield "RuntimeDirectoryPreserve=yes"
    for path in (settings.state_dir, settings.run_dir, settings.simulator, settings.dcgm_mapping):
        if path not in ("", STATE_DIR, RUN_DIR):
            yield f"ReadWritePaths=-{_word(path)}"


def _word(path: str) -> str:
    return path.replace("%", "%%").replace(" ", "\\x20")


def notify(*lines: str) -> None:
    """Tell systemd, if it started this process, how it is (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        # A full queue must not stop the loop: systemd has been told often enough then.
        channel.setblocking(False)
        try:
            channel.sendto("\n".join(lines).encode(), address.replace("@", "\0", 1))
        except OSError as error:
            log.warning("systemd does not hear %s: %s", lines[0], error.strerror)
