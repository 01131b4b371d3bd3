"""What `gres-mig setup` writes: planned and compared first, so that it can be shown instead."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from gres_mig import config_text
from gres_mig.commands import boot_unit
from gres_mig.errors import ConfigError
from gres_mig.files import keep_copy, make_folder, replace_whole
from gres_mig.models import Gpu, Settings
from gres_mig.mounts import refuse_a_network_file_system
from gres_mig.service import systemd
from gres_mig.values import Value


class File(Value):
    """A file to be written."""

    path: str
    text: str
    before: str | None
    """What is there now; None: nothing."""

    @property
    def state(self) -> str:
        """`new`, `changed` or `unchanged`."""
        return "new" if self.before is None else "unchanged" if self.before == self.text else "changed"


class Plan(Value):
    """All that is to be written for one node."""

    settings: Settings
    gpus: tuple[Gpu, ...]
    configuration: File
    unit: File
    folder_ready: bool
    """The folder of the records is there, and only its owner's."""
    service: tuple[File, ...] = ()
    """The service's unit, if that is wanted."""

    @property
    def files(self) -> tuple[File, ...]:
        """All of them."""
        return self.configuration, self.unit, *self.service


def plan(settings: Settings, gpus: Sequence[Gpu], options: Sequence[str], *, with_service: bool = False) -> Plan:
    """What those settings take; `options` name the node on the units' command lines."""
    refuse_a_network_file_system(settings.state_dir)
    # A rehearsal on a simulated node leaves this machine's systemd alone.
    folder = os.path.join(settings.simulator, "systemd") if settings.simulator else boot_unit.FOLDER
    ready = os.path.isdir(settings.state_dir) and not stat.S_IMODE(os.stat(settings.state_dir).st_mode) & 0o077
    return Plan(
        settings,
        tuple(gpus),
        _file(settings.config_path, config_text.render(settings, gpus)),
        _file(os.path.join(folder, boot_unit.NAME), boot_unit.render(options)),
        ready,
        (_file(os.path.join(folder, systemd.NAME), service_unit(settings, options)),) if with_service else (),
    )


def service_unit(settings: Settings, options: Sequence[str], *, socket: bool = True) -> str:
    """The text of the service's unit."""
    words = ["serve"] if socket else ["serve", "--no-socket"]
    return systemd.unit(boot_unit.command_line(*options, *words), settings)


def write(wanted: Plan) -> str:
    """Write it all; the path of the copy of an old configuration that is replaced, or nothing."""
    settings, configuration = wanted.settings, wanted.configuration
    kept = ""
    try:
        make_folder(settings.state_dir, 0o700)
        os.chmod(settings.state_dir, 0o700)
        if configuration.state == "changed":
            kept = keep_copy(configuration.path)
        if configuration.state != "unchanged":
            config_text.write(settings, wanted.gpus)
        for unit in (wanted.unit, *wanted.service):
            if unit.state != "unchanged":
                replace_whole(unit.path, unit.text)
    except OSError as error:
        raise ConfigError(f"writing {error.filename}: {error.strerror}") from error
    return kept


def told(wanted: Plan, kept: str, *, written: bool) -> Iterator[str]:
    """What was written, or would be with all that is new in it."""
    would = "" if written else "would be "
    if not wanted.folder_ready:
        yield f"{wanted.settings.state_dir}: {would}made, mode 0700"
    for file in wanted.files:
        yield f"{file.path}: " + ("unchanged" if file.state == "unchanged" else f"{would}written")
        if file.state != "unchanged" and not written:
            yield from (f"    {line}".rstrip() for line in _shown(file))
    if kept:
        yield f"{kept}: the configuration as it was"
    elif wanted.configuration.state == "changed":
        yield f"{wanted.configuration.path}.bak-TIME: the configuration as it is would be kept there"


def _file(path: str, text: str) -> File:
    try:
        before = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return File(path, text, None)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reading {path}: {error}") from error
    return File(path, text, before)


def _shown(file: File) -> Iterator[str]:
    lines = file.text.splitlines()
    if file.before is None:
        return iter(lines)
    return difflib.unified_diff(file.before.splitlines(), lines, "as it is", "as it would be", lineterm="")
