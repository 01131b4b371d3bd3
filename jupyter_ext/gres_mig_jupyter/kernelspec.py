"""Kernel specs that ask for GPU memory: made from another spec, and told from everybody else's by a mark in them."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager, NoSuchKernel
from jupyter_core.paths import SYSTEM_JUPYTER_PATH

from gres_mig.errors import BadRequest, ConfigError, Conflict, GresMigError, NotPermitted
from gres_mig.files import make_folder, replace_whole
from gres_mig.values import Value

PROVISIONER = "gres-mig"
_MARK = "gres_mig"
_FILE = "kernel.json"
_GIB = 1024


class Wanted(Value):
    """What a kernel of a spec gets, and how long it may be idle."""

    memory_mib: int = 0
    """0 where a profile is named."""
    profile: str = ""
    cull_after_s: int = 0
    """0: as long as other kernels."""

    @property
    def suffix(self) -> str:
        """`gpu-8g`, `gpu-8000m` or `gpu-1g.24gb.me`: in a spec's name are letters, digits, dots and hyphens only."""
        if self.profile:
            return f"gpu-{re.sub(r'[^a-z0-9._-]', '.', self.profile.lower())}"
        gib, rest = divmod(self.memory_mib, _GIB)
        return f"gpu-{self.memory_mib}m" if rest else f"gpu-{gib}g"

    @property
    def title(self) -> str:
        """`GPU 8 GiB`, `GPU 7.8 GiB` or `GPU 1g.24gb`; never more than what is asked for."""
        if self.profile:
            return f"GPU {self.profile}"
        tenths = self.memory_mib * 10 // _GIB
        return f"GPU {tenths / 10:g} GiB" if tenths else f"GPU {self.memory_mib} MiB"


class Spec(Value):
    """A kernel spec of ours, as it is installed."""

    name: str
    title: str
    folder: str
    wanted: Wanted
    base: str
    state: Literal["new", "changed", "unchanged"] = "unchanged"


def place(*, user: bool, prefix: str) -> str:
    """Where specs are installed: the user's own, below a prefix, or else everybody's; one's own for all but root."""
    if prefix:
        return os.path.join(os.path.abspath(prefix), "share", "jupyter", "kernels")
    if user or os.geteuid() != 0:
        return KernelSpecManager().user_kernel_dir
    return os.path.join(SYSTEM_JUPYTER_PATH[0], "kernels")


def install(base: str, wanted: Wanted, kernels: str) -> Spec:
    """Write the spec that is like `base` and gets what is wanted; what is there already stays."""
    origin = _origin(base)
    # A base may come from a folder in capitals, which Jupyter finds under small letters.
    name = f"{base.lower()}-{wanted.suffix}"
    title = f"{origin.display_name.removesuffix(' (ipykernel)')} · {wanted.title}"
    folder = os.path.join(kernels, name)
    text = json.dumps(_content(origin, base, title, wanted), indent=1, ensure_ascii=False) + "\n"
    before = _read(folder)
    if os.path.lexists(folder) and not _is_ours(before):
        raise Conflict(
            f"{folder} was not made by gres-mig and is left alone", hint=f"run: jupyter kernelspec remove {name}"
        )
    state: Literal["new", "changed", "unchanged"] = "new" if before is None else "changed"
    if before == json.loads(text):
        state = "unchanged"
    else:
        _write(folder, origin.resource_dir, text)
    return Spec(name, title, folder, wanted, base, state)


def installed(folders: Sequence[str] = ()) -> list[Spec]:
    """Our specs in those folders, or in all that Jupyter looks into."""
    return [spec for kernels in folders or KernelSpecManager().kernel_dirs for spec in _ours(kernels)]


def remove(spec: Spec) -> None:
    """Remove a spec of ours; kernels that run are none of its business."""
    if not _is_ours(_read(spec.folder)):
        raise Conflict(f"{spec.folder} was not made by gres-mig and is left alone")
    try:
        shutil.rmtree(spec.folder)
    except OSError as error:
        raise _unwritten("removing", error) from error


def _origin(base: str) -> KernelSpec:
    manager = KernelSpecManager()
    try:
        spec = manager.get_kernel_spec(base)
    except NoSuchKernel:
        there = ", ".join(sorted(manager.find_kernel_specs()))
        hint = f"there are: {there}" if there else "there are none; install ipykernel where gres-mig is"
        raise BadRequest(f"there is no kernel spec {base!r:.60} to make one from", hint=hint) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"reading the kernel spec {base}: {error}") from error
    stanza = spec.metadata.get("kernel_provisioner", {})
    if stanza.get("provisioner_name") == PROVISIONER:
        made_from = spec.metadata.get(_MARK, {}).get("base", "python3")
        raise BadRequest(f"{base} asks for GPU memory itself", hint=f"make one from another: --from {made_from}")
    if stanza.get("provisioner_name", "local-provisioner") != "local-provisioner":
        raise BadRequest(
            f"{base} is started by the provisioner {stanza['provisioner_name']}, and gres-mig starts local kernels only"
        )
    return spec


def _content(origin: KernelSpec, base: str, title: str, wanted: Wanted) -> dict[str, Any]:
    asked = {"profile": wanted.profile} if wanted.profile else {"memory": str(wanted.memory_mib)}
    metadata = {key: value for key, value in origin.metadata.items() if key != "cull_idle_timeout"}
    metadata["kernel_provisioner"] = {"provisioner_name": PROVISIONER, "config": asked}
    metadata[_MARK] = {"base": base}
    if wanted.cull_after_s:
        metadata["cull_idle_timeout"] = wanted.cull_after_s
    content = {**origin.to_dict(), "display_name": title, "metadata": metadata}
    return {key: value for key, value in content.items() if value not in ("", {})}


def _write(folder: str, resources: str, text: str) -> None:
    """Make the folder whole before it is found under its name; into one that is there, its spec comes last."""
    try:
        make_folder(os.path.dirname(folder))
        there = os.path.isdir(folder)
        # Hidden and without a spec: no server that lists kernels meanwhile takes it for one.
        into = folder if there else tempfile.mkdtemp(prefix=".gres-mig-", dir=os.path.dirname(folder))
        for entry in os.scandir(resources):
            if entry.name != _FILE and entry.is_file() and not entry.name.endswith((".py", ".pyc")):
                shutil.copyfile(entry.path, os.path.join(into, entry.name))
        replace_whole(os.path.join(into, _FILE), text)
        if not there:
            os.chmod(into, 0o755)
            os.rename(into, folder)
    except OSError as error:
        raise _unwritten("writing", error) from error


def _unwritten(doing: str, error: OSError) -> GresMigError:
    message = f"{doing} {error.filename}: {error.strerror}"
    if isinstance(error, PermissionError):
        return NotPermitted(message, hint="run it as root, or for yourself alone: --user")
    return ConfigError(message)


def _ours(kernels: str) -> Iterator[Spec]:
    try:
        names = sorted(os.listdir(kernels))
    except OSError:
        return
    for name in names:
        folder = os.path.join(kernels, name)
        content = _read(folder)
        if content is not None and _is_ours(content):
            metadata = content["metadata"]
            asked = metadata.get("kernel_provisioner", {}).get("config", {})
            memory = str(asked.get("memory", ""))
            wanted = Wanted(
                int(memory) if memory.isdigit() else 0,
                str(asked.get("profile", "")),
                int(metadata.get("cull_idle_timeout", 0)),
            )
            yield Spec(name, content.get("display_name", name), folder, wanted, metadata[_MARK].get("base", ""))


def _read(folder: str) -> dict[str, Any] | None:
    try:
        with open(os.path.join(folder, _FILE), encoding="utf-8") as stream:
            content = json.load(stream)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _is_ours(content: dict[str, Any] | None) -> bool:
    metadata = (content or {}).get("metadata", {})
    return isinstance(metadata, dict) and isinstance(metadata.get(_MARK), dict)
