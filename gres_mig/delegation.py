"""What one user is given so that he makes instances without root: this node's records, and the driver's leave."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable, Iterator

from gres_mig import presence
from gres_mig.answers import delegated
from gres_mig.errors import BadRequest, ConfigError, NodeFault
from gres_mig.files import make_folder
from gres_mig.models import Settings
from gres_mig.mounts import refuse_a_network_file_system
from gres_mig.values import Value

_Entry = tuple[str, "int | None"]
"""A name, and the descriptor of the folder that it is in where it says that not itself."""

_LEAVE = "proc/driver/nvidia/capabilities/mig/config"
"""Whoever can open the device node of this capability may make and destroy instances, as root may (nvml.h)."""
_NODE = "dev/nvidia-caps/nvidia-cap{}"


class Step(Value):
    """One thing that is changed."""

    path: str
    text: str
    needed: bool
    """Whether it is not so already."""
    do: Callable[[], None]


def user(name: str) -> pwd.struct_passwd:
    """The account of that name or uid."""
    try:
        return pwd.getpwuid(int(name)) if name.isascii() and name.isdigit() else pwd.getpwnam(name)
    except (KeyError, OverflowError):
        raise BadRequest(
            f"there is no user {name!r:.60} on this machine", hint="name one, or root to undo it"
        ) from None


def grants(name: str, settings: Settings) -> list[str]:
    """What that gives to whom, said plainly."""
    if name == "root":
        return ["the records and the driver's leave to make instances are root's alone again"]
    if settings.simulator:
        return [f"{name} may do on this simulated node all that its maker may"]
    return [
        f"{name} may make and destroy MIG instances on all GPUs here, managed or not: NVIDIA has no smaller permission",
        f"{name} may change this node's records: whose an instance is, what is fenced",
        "MIG mode and all else of the GPUs stay root's; other users get nothing: the node service is for them",
    ]


def plan(settings: Settings, account: pwd.struct_passwd, root: str = "/") -> list[Step]:
    """All that is to be changed; `root` is where this machine's /proc and /dev are."""
    if (running := presence.running(settings.run_dir)) and account.pw_uid:
        raise BadRequest(
            f"the node service runs (pid {running.pid}): it serves every user, and needs the records to be root's",
            hint="end it first: systemctl disable --now gres-mig",
        )
    if account.pw_uid and os.path.lexists(handovers := os.path.join(settings.run_dir, "slurm")):
        raise BadRequest(
            f"Slurm's jobs get instances here ({handovers}): its hooks need the records and that folder to be root's",
            hint="give a machine to one user that is no node of Slurm's",
        )
    refuse_a_network_file_system(settings.state_dir)
    left = _left_by_a_service(settings)
    if settings.simulator:
        return [*left, _folder(settings.simulator, 0o755, account, _everything)]
    steps = [
        *left,
        _folder(settings.state_dir, 0o700, account, _files),
        _folder(settings.run_dir, 0o755, account, _files),
    ]
    return [*steps, *_driver(account, root)]


def _left_by_a_service(settings: Settings) -> list[Step]:
    """An ended service's socket, which would have notebook servers wait for it; while it runs, nothing is delegated."""
    path = os.path.join(settings.run_dir, presence.SOCKET)
    if presence.running(settings.run_dir) or not os.path.lexists(path):
        return []
    return [Step(path, "the socket of a service that has ended is removed", True, lambda: os.unlink(path))]


def renew(settings: Settings, root: str = "/") -> list[Step]:
    """After a boot /run and /dev are new, and whose the records are says who is to have them."""
    uid = delegated(settings)
    if not uid:
        return []
    try:
        return plan(settings, pwd.getpwuid(uid), root)
    except KeyError:
        hint = "run: gres-mig setup --delegate root --write"
        raise ConfigError(f"{settings.state_dir} belongs to uid {uid}, which is no user", hint=hint) from None


def carry_out(steps: list[Step]) -> None:
    """Do what is needed."""
    for step in steps:
        if step.needed:
            try:
                step.do()
            except OSError as error:
                raise ConfigError(f"{step.path}: {step.text}: {error.strerror}") from error


def _folder(path: str, mode: int, account: pwd.struct_passwd, contents: Callable[[str], Iterator[_Entry]]) -> Step:
    def do() -> None:
        make_folder(path, mode)
        for name, folder in contents(path):
            _give(name, account, folder)
        _give(path, account)

    there = os.path.isdir(path) and os.lstat(path).st_uid == account.pw_uid and _have(contents(path), account)
    return Step(path, f"it and what is in it belong to {account.pw_name}", not there, do)


def _have(entries: Iterator[_Entry], account: pwd.struct_passwd) -> bool:
    owners = {os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid for name, folder in entries}
    return owners <= {account.pw_uid}


def _files(path: str) -> Iterator[_Entry]:
    # No deeper: the folder cannot be exchanged under us, one in it could.
    return ((os.path.join(path, name), None) for name in os.listdir(path))


def _everything(path: str) -> Iterator[_Entry]:
    # By descriptors: whoever has the tree could put a link to another folder in the place of one of its own.
    for _, folders, files, descriptor in os.fwalk(path):
        # Its configuration stays its maker's, who would not trust another's when he takes the node back.
        yield from ((name, descriptor) for name in (*files, *folders) if name != "config.toml")


def _give(path: str, account: pwd.struct_passwd, folder: int | None = None) -> None:
    # By descriptor and for what it is now: whoever had the folder may put something else there meanwhile.
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        plain = stat.S_ISDIR(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink == 1)
        if os.path.basename(path).startswith("config.") and path.endswith(".json"):
            # What validation made of the configuration: kept by one user, it is not another's to trust.
            os.unlink(path, dir_fd=folder)
        elif plain and status.st_uid != account.pw_uid:
            os.chown(f"/proc/self/fd/{descriptor}", account.pw_uid, account.pw_gid)
    finally:
        os.close(descriptor)


def _driver(account: pwd.struct_passwd, root: str) -> list[Step]:
    leave = os.path.join(root, _LEAVE)
    try:
        with open(leave, encoding="ascii") as file:
            told = dict(line.split(": ") for line in file.read().splitlines())
        minor, modify = int(told["DeviceFileMinor"]), told["DeviceFileModify"]
        device = os.makedev(_major(root), minor)
    except (OSError, ValueError, KeyError) as error:
        hint = "is it loaded, and has a GPU of this machine MIG? see: gres-mig doctor"
        raise NodeFault(f"the driver shows no permission to give: reading {leave}: {error}", hint=hint) from error
    node = os.path.join(root, _NODE.format(minor))
    wanted = "1" if account.pw_uid == 0 else "0"

    def keep() -> None:
        with open(leave, "w", encoding="ascii") as file:
            file.write(f"DeviceFileModify: {wanted}\n")

    def give() -> None:
        make_folder(os.path.dirname(node))
        if not os.path.lexists(node):
            os.mknod(node, 0o400 | stat.S_IFCHR, device)
        os.chown(node, account.pw_uid, account.pw_gid, follow_symlinks=False)
        os.chmod(node, 0o400)

    # In this order: nvidia-modprobe, which any user may run, makes the node root's again while the driver allows it.
    return [
        Step(leave, "the driver's tools " + ("look after" if wanted == "1" else "leave alone") + " its device node",
             modify != wanted, keep),
        Step(node, f"only {account.pw_name} may open it", not _has(node, account, device), give),
    ]  # fmt: skip


def _major(root: str) -> int:
    with open(os.path.join(root, "proc/devices"), encoding="ascii") as file:
        words = (line.split() for line in file)
        return next(int(line[0]) for line in words if line[1:] == ["nvidia-caps"])


def _has(node: str, account: pwd.struct_passwd, device: int) -> bool:
    try:
        status = os.lstat(node)
    except FileNotFoundError:
        return False
    if not stat.S_ISCHR(status.st_mode) or status.st_rdev != device:
        raise NodeFault(f"{node} is not the device it should be", hint="run: nvidia-modprobe -f /" + _LEAVE)
    return status.st_uid == account.pw_uid and stat.S_IMODE(status.st_mode) == 0o400
