"""A node's settings: its config.toml, or what validation made of the very same text before.

Validating imports pydantic, which costs several times what a whole hook may; so the result is kept beside the
locks, and a process that finds it imports neither pydantic nor a TOML parser.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress

from gres_mig import __version__
from gres_mig.errors import BadRequest, ConfigError
from gres_mig.models import Settings
from gres_mig.serving import Serving
from gres_mig.slice_models import Slicing
from gres_mig.values import fields_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

CONFIG_PATH = "/etc/gres-mig/config.toml"
STATE_DIR = "/var/lib/gres-mig"
RUN_DIR = "/run/gres-mig"

_MAX_BYTES = 1 << 16


def load(
    path: Path | str | None = None, *, node: Path | str | None = None, name: str = "", kept_in: str = ""
) -> Settings:
    """The settings in `path`, or of the simulated node in the folder `node`, or of this machine.

    A machine without /etc/gres-mig/config.toml manages no GPU; a file that was asked for has to be there.
    `name` is which of several Slurm nodes on this machine is meant, where the file has `[node.NAME]` sections.
    `kept_in` is where the result of validation is kept, when that is not with the locks.
    """
    settings = defaults(path, node=node)
    file = settings.config_path
    try:
        text, mode = _read(file, simulated=node is not None)
    except (FileNotFoundError, NotADirectoryError) as error:
        if node is not None:
            hint = f"run: gres-mig simulate create {node} --board rtx-pro-6000"
            raise ConfigError(f"{node} holds no simulated node: {file} is missing", hint=hint) from error
        if path is not None:
            raise ConfigError(f"reading {file}: there is no such file") from error
        return settings
    key = [__version__, file, settings.simulator, name, text]
    # One for each name: nodes that share a machine would otherwise undo each other's at every job.
    cache = f"config.{_plain(name)}.json" if name else "config.json"
    kept = _kept(kept_in or settings.run_dir, cache, key)
    if kept is None:
        from gres_mig import config_schema

        kept = config_schema.validate(text, settings, name)
        _keep(kept_in or settings.run_dir, cache, key, kept, mode)
    return kept


def defaults(path: Path | str | None = None, *, node: Path | str | None = None) -> Settings:
    """What an empty file at that place means."""
    if node is not None:
        if path is not None:
            raise BadRequest("a node and a configuration file were named", hint="a simulated node has its own file")
        folder = os.path.abspath(node)
        return Settings(
            state_dir=os.path.join(folder, "state"),
            run_dir=os.path.join(folder, "run"),
            config_path=os.path.join(folder, "config.toml"),
            simulator=folder,
        )
    file = CONFIG_PATH if path is None else os.path.abspath(path)
    return Settings(state_dir=STATE_DIR, run_dir=RUN_DIR, config_path=file)


def _read(file: str, *, simulated: bool) -> tuple[str, int]:
    """The text and the permissions of a file that nobody but root and the caller can have written."""
    try:
        # Non-blocking, for a named pipe would otherwise wait for its writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise ConfigError(f"reading {file}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"reading {file}: it is not a regular file")
        _refuse_if_others_can_write(file, status)
        if not simulated:
            folder = os.path.dirname(file)
            _refuse_if_others_can_write(folder, os.stat(folder))
        content = os.read(descriptor, _MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"reading {file}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"reading {file}: it is larger than {_MAX_BYTES // 1024} KiB")
    try:
        return content.decode(), stat.S_IMODE(status.st_mode)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: byte 0x{content[error.start]:02x} is not UTF-8") from error


def _refuse_if_others_can_write(path: str, status: os.stat_result) -> None:
    if not _owned(status):
        who = "root" if os.geteuid() == 0 else f"root or uid {os.geteuid()}"
        hint = f"run: chown root {_shell_word(path)}"
        raise ConfigError(f"{path} belongs to uid {status.st_uid}, not to {who}: not trusted", hint=hint)
    # In a sticky folder, as /tmp is, only a file's owner can replace it.
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & 0o022 and not sticky:
        mode = stat.S_IMODE(status.st_mode)
        hint = f"run: chmod go-w {_shell_word(path)}"
        raise ConfigError(f"{path} has mode {mode:04o}, others can write it: not trusted", hint=hint)


def _owned(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def _shell_word(path: str) -> str:
    import shlex

    return shlex.quote(path)


def _plain(name: str) -> str:
    if len(name) > 64 or not name.isascii() or not name.translate({ord(c): None for c in "._-"}).isalnum():
        raise ConfigError(f"{name!r} is no name of a Slurm node")
    return name


def _kept(run_dir: str, cache: str, key: list[str]) -> Settings | None:
    """What was kept under exactly this key, if nobody but root and the caller can have put it there."""
    try:
        folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not _trusted(folder):
            return None
        descriptor = os.open(cache, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with open(descriptor, "rb") as stream:
            if not _trusted(descriptor):
                return None
            kept = json.loads(stream.read())
    except (OSError, ValueError):
        return None
    finally:
        os.close(folder)
    if not isinstance(kept, dict) or kept.get("key") != key:
        return None
    values = kept["settings"]
    return _from_json(values) if values.keys() == set(Settings.field_names()) else None


def _trusted(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    return _owned(status) and not status.st_mode & 0o022


def _from_json(values: dict[str, Any]) -> Settings:
    managed = tuple(values.pop("managed"))
    shared = values.pop("slicing")
    slicing = Slicing(**{**shared, "gpus": tuple(shared["gpus"])})
    allowed = {model: tuple(names) for model, names in values.pop("allowed").items()}
    serving = Serving(**values.pop("serving"))
    return Settings(managed=managed, slicing=slicing, serving=serving, allowed=allowed, **values)


def _keep(run_dir: str, cache: str, key: list[str], settings: Settings, mode: int) -> None:
    """Keep the result for the next process; where that cannot be done, the next one validates again."""
    plain = {**fields_of(settings), "slicing": fields_of(settings.slicing), "serving": fields_of(settings.serving)}
    content = json.dumps({"key": key, "settings": plain}).encode()
    temporary = f".{cache}.{os.getpid()}"
    with suppress(OSError):
        folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not _trusted(folder):
                return
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
            with open(descriptor, "wb") as stream:
                # Readable to whom the file itself is.
                os.fchmod(descriptor, mode & 0o644)
                stream.write(content)
            # Not synced: half a file after a power cut is no JSON, and is validated again.
            os.replace(temporary, cache, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            os.close(folder)
