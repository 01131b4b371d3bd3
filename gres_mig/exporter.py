"""Tells dcgm-exporter whose GPU instance is whose: its HPC job mapping, one file a GPU instance.

The file of GPU instance I of GPU G is `G.I` and holds its owner's id; the file `G` is the whole GPU's, and that of all
its slices. The exporter lists the folder at each scrape and then opens what it listed; of a file that went away in
between the whole scrape fails (hpc.go of dcgm-exporter 4.5). So a file is replaced whole, or emptied, which means
nobody's, and never removed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator

from gres_mig import log
from gres_mig.errors import GresMigError
from gres_mig.exporter_reload import Reload
from gres_mig.files import make_folder
from gres_mig.models import Allocation, Gpu, Owner, Settings, State

_LONGEST = 1 << 16


class JobMapping:
    """The mapping of one node's managed GPUs; a GPU's files are changed under that GPU's lock only.

    Nothing in here fails an operation: what cannot be written is told in the log, and written by a later one.
    """

    def __init__(self, settings: Settings, read: Callable[[], State]) -> None:
        self._settings, self._read, self._folder = settings, read, settings.dcgm_mapping
        self._reload = Reload(settings)
        self._indexes: dict[str, int] = {}
        self._shared = set[str]()
        self._changed = False

    def saw(self, gpus: Iterable[Gpu]) -> None:
        """Remember how the driver numbers these GPUs now; DCGM numbers them alike."""
        for gpu in gpus:
            if gpu.uuid and self._settings.manages(gpu):
                self._indexes[gpu.uuid] = gpu.index
                if gpu.sliced:
                    self._shared.add(gpu.uuid)

    def show(self, gpu_uuid: str) -> None:
        """Let that GPU's files say what the records say."""
        if not self._folder or gpu_uuid not in self._indexes:
            return
        try:
            make_folder(self._folder)
            _refuse_if_others_can_write(self._folder)
            for name, text in self._differing(gpu_uuid):
                _replace(os.path.join(self._folder, name), text)
                self._changed = True
        except (OSError, GresMigError) as error:
            log.warning("telling dcgm-exporter who is on %s: %s", gpu_uuid, error)

    def leave(self, gpu_uuid: str) -> None:
        """The same when work on that GPU is over; if anything changed meanwhile, the exporter is to look again."""
        self.show(gpu_uuid)
        self.reload()

    def reload(self) -> None:
        """Let the exporter look again where that is due."""
        self._reload.ask(changed=self._changed)
        self._changed = False

    def is_of_unknown_gpus(self) -> bool:
        """Whether there are files that name somebody, and no GPU was seen yet that they could be of."""
        if not self._folder or self._indexes:
            return False
        files = (os.path.join(self._folder, name) for name in self._there() if name.partition(".")[0].isdigit())
        return any(os.path.lexists(path) and os.path.getsize(path) > 0 for path in files)

    def wrong(self) -> tuple[str, ...]:
        """The GPUs whose files say something else than the records: what a crash left, or a change under way."""
        try:
            return tuple(uuid for uuid in self._indexes if any(self._differing(uuid))) if self._folder else ()
        except (OSError, GresMigError) as error:
            log.warning("reading what dcgm-exporter is told: %s", error)
            return ()

    def _differing(self, gpu_uuid: str) -> Iterator[tuple[str, str]]:
        """What files of that GPU have to say and do not; those to be emptied come first."""
        gpu = str(self._indexes[gpu_uuid])
        held = [
            record
            for record in self._read().records
            if isinstance(record, Allocation) and record.gpu_uuid == gpu_uuid and not record.lost
        ]
        wanted = {name: "" for name in self._there() if name.startswith(f"{gpu}.") and name[len(gpu) + 1 :].isdigit()}
        wanted.update((f"{gpu}.{r.gi_id}", f"{shown(r.owner)}\n") for r in held if r.gi_id >= 0 and not r.slice)
        # Of what shares a GPU without MIG the exporter has no metrics apart from the GPU's.
        if self._settings.dcgm_whole_gpu or gpu_uuid in self._shared or any(r.slice for r in held):
            wanted[gpu] = "".join(f"{shown(r.owner)}\n" for r in sorted(held, key=lambda r: r.gi_id))
        for name, text in sorted(wanted.items(), key=lambda item: len(item[1])):
            if _text(os.path.join(self._folder, name)) != text:
                yield name, text

    def _there(self) -> list[str]:
        try:
            return os.listdir(self._folder)
        except FileNotFoundError:
            return []


def shown(owner: Owner) -> str:
    """What a label says of an owner: a Slurm job's id, else its kind and name; no uid, for metrics are widely read."""
    kind, *parts = owner.name.split(":")
    return parts[-1] if kind == "slurm" else f"{kind}:{parts[-1]}"


def _refuse_if_others_can_write(folder: str) -> None:
    status = os.stat(folder)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(f"{folder} is not root's alone to write (uid {status.st_uid}, mode {mode:04o})")


def _text(path: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return ""
    try:
        return os.read(descriptor, _LONGEST).decode(errors="replace")
    finally:
        os.close(descriptor)


def _replace(path: str, text: str) -> None:
    # The exporter passes over a name that is no number. There is one name, since the GPU's lock is held.
    temporary = f"{path}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o644)
    try:
        os.fchmod(descriptor, 0o644)
        data = memoryview(text.encode())
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)
    # Not synced: a boot leaves no instance that a file could be about.
    os.replace(temporary, path)
