"""What systemd's files say of a node's units: which start at boot, which run, and in which order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from gres_mig.exporter_reload import CGROUP_TREES

_FOLDERS = ("etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
"""The first that has a unit is the one that counts."""


class Units:
    """The units of the machine whose files are below `root`; systemd itself, which may be starting, is not asked."""

    def __init__(self, root: Path) -> None:
        self._folders = tuple(root / folder for folder in _FOLDERS)
        self._cgroups = root / "sys/fs/cgroup"

    def is_there(self, unit: str) -> bool:
        """Whether there is such a unit, and it is not masked."""
        file = self._file(unit)
        return file is not None and os.path.realpath(file) != os.devnull

    def starts_at_boot(self, unit: str) -> bool:
        """Whether something wants it; the link alone counts, wherever it leads."""
        file = self._file(unit)
        if file is not None and os.path.realpath(file) == os.devnull:
            return False
        wanted = (folder.glob(kind) for folder in self._folders for kind in ("*.wants", "*.requires"))
        return any(os.path.lexists(each / unit) for found in wanted for each in found)

    def runs(self, unit: str) -> bool:
        """Whether it has processes now."""
        return any((self._cgroups / tree / "system.slice" / unit).is_dir() for tree in CGROUP_TREES)

    def comes_after(self, later: str, earlier: str) -> bool:
        """Whether one starts only when the other has started, as far as the two say it themselves."""
        return earlier in self._words(later, "After") or later in self._words(earlier, "Before")

    def value(self, unit: str, key: str) -> str:
        """What it says of that key last; empty where it does not."""
        return next(reversed([value for name, value in self._settings(unit) if name == key]), "")

    def _words(self, unit: str, key: str) -> set[str]:
        found: set[str] = set()
        for name, value in self._settings(unit):
            if name == key:
                # Nothing after the sign forgets what was said before.
                found = found | set(value.split()) if value else set()
        return found

    def _settings(self, unit: str) -> Iterator[tuple[str, str]]:
        """What its file says, then what the files that an admin added to it say."""
        file = self._file(unit)
        added = sorted(
            (path for folder in self._folders for path in folder.glob(f"{unit}.d/*.conf")), key=lambda path: path.name
        )
        for path in ([file] if file else []) + added:
            try:
                text = path.read_text(errors="replace")
            except OSError:
                continue
            for line in re.sub(r"\\\n", " ", text).splitlines():
                key, sign, value = line.strip().partition("=")
                if sign and not key.startswith(("#", ";")):
                    yield key.strip(), value.strip()

    def _file(self, unit: str) -> Path | None:
        return next((folder / unit for folder in self._folders if os.path.lexists(folder / unit)), None)
