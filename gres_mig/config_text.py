"""Writes config.toml: every key with what it means, those that say nothing new commented out."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gres_mig import config
from gres_mig.errors import ConfigError
from gres_mig.files import make_folder, replace_whole
from gres_mig.models import Gpu, Settings
from gres_mig.values import replace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HEADER = """\
# gres-mig: what this node may do with its GPUs. Every key is explained in docs/config.md.
# A change is in force for whatever starts after it; a service that runs takes it with: gres-mig reload
"""

_GPUS = """\
# The GPUs that gres-mig may change, by UUID or PCI address, or "*" for all.
# None of the others ever sees a call that changes something."""

_KEYS = {
    "placement": ("placement", 'Where an instance goes: "least-damage", "spread" or "binpack".'),
    "compute": ("compute", 'Among profiles of the same memory and slices: the one with the "most" or "least" compute.'),
    "upsize": ("upsize", "Whether a larger profile may serve when no exact one has a place on any GPU."),
    "reserve": ("reserve_mib", 'Memory of each managed GPU that is never given out: MiB, or "2G".'),
    "mig_at_boot": ("mig_at_boot", "Whether the boot unit turns MIG on for managed idle GPUs."),
    "bare": ("bare", 'An instance that a crash left half made: "destroy" or "quarantine" it.'),
    "bare_grace": ("bare_grace_s", "Seconds over which it has to be seen half made before that."),
    "hardware_timeout": ("hardware_timeout_s", "Seconds after which a GPU whose driver does not answer is fenced."),
    "lock_wait": ("lock_wait_s", "Seconds to wait for a GPU on which others are making or destroying instances."),
    "in_use_wait": ("in_use_wait_s", "Seconds to try again when the driver says that an instance is still in use."),
    "aged": ("aged_s", "Seconds that a job waits for a place before one is kept free for it."),
    "admission": ("admission", 'What keeps Slurm from starting jobs without a place: "count" or "gates".'),
    "dcgm_mapping": ("dcgm_mapping", "The folder of dcgm-exporter's HPC job mapping; empty: it is told nothing."),
    "dcgm_whole_gpu": ("dcgm_whole_gpu", "Whether it is told who is on a GPU as a whole, too."),
    "dcgm_sighup": ("dcgm_sighup", "Its unit or pid file, for a SIGHUP when instances came or went; empty: none."),
}
_SERVING_KEYS = {
    "user_memory": ("memory_mib", 'What the instances of one Jupyter user may hold together: "48G"; "0": any memory.'),
    "user_instances": ("instances", "How many instances one Jupyter user may have; 0: any number."),
    "user_requests": ("requests", "How many requests of one user the service answers in a second; 0: any number."),
    "user_connections": ("connections", "From how many connections of one user the service reads at once."),
    "metrics_port": ("metrics_port", "A port of 127.0.0.1 where the service shows its metrics, too; 0: none."),
}
_SLICES = """\
# GPUs shared by software limits instead, or "*" for all without MIG; docs/slices.md says how strong that is."""
_SLICE_KEYS = {
    "hami_core": ("hami_core", "The admin's libvgpu.so; gres-mig brings none along."),
    "keep_umask": ("keep_umask", "What `gres-mig slices build` made, for libvgpu.so changes the umask of a process."),
    "slice_overhead": ("overhead_mib", 'Memory each slice takes beyond its size: "512M", "0" or "auto".'),
    "slice_reserve": ("reserve_mib", 'Memory of each shared GPU that is never given out: "2G", "0" or "auto".'),
    "experimental_driver_limit": ("driver_limit", "Whether the limits of driver 615 and later may be used."),
    "over_grant": ("over_grant", 'A slice that uses more than it was given: "warn" of it, or "end" it.'),
    "over_grant_after": ("over_grant_after_s", "Seconds after which it is ended."),
}
_PROFILES = """\
# The profiles that may be made, by GPU model; a model that is not listed allows every plain one."""


def render(settings: Settings, gpus: Sequence[Gpu] = ()) -> str:
    """The config.toml that means `settings`; `gpus`, the node's own, are named in comments."""
    usual = config.defaults(settings.config_path)
    if settings.simulator:
        usual = config.defaults(node=settings.simulator)
    blocks = [_HEADER]
    if settings.simulator:
        beside = os.path.dirname(settings.config_path) == settings.simulator
        folder = "." if beside else settings.simulator
        blocks.append(f"# The GPUs are simulated; their hardware is in this folder.\nsimulator = {_toml(folder)}\n")
    blocks.append("\n".join([_GPUS, *_managed(settings.managed, gpus), ""]))
    for key, (name, meaning) in _KEYS.items():
        value = getattr(settings, name)
        off = "# " if value == getattr(usual, name) else ""
        blocks.append(f"# {meaning}\n{off}{key} = {_toml(str(value) if key == 'reserve' else value)}\n")
    for key, (name, meaning) in _SERVING_KEYS.items():
        value = getattr(settings.serving, name)
        off = "# " if value == getattr(usual.serving, name) else ""
        blocks.append(f"# {meaning}\n{off}{key} = {_toml(str(value) if key == 'user_memory' else value)}\n")
    slicing = settings.slicing
    off = "" if slicing.gpus else "# "
    shared = '"*"' if slicing.gpus in {(), ("*",)} else f"[{', '.join(_toml(entry) for entry in slicing.gpus)}]"
    blocks.append(f"{_SLICES}\n{off}slices = {shared}\n")
    for key, (name, meaning) in _SLICE_KEYS.items():
        value = getattr(slicing, name)
        off = "# " if value == getattr(usual.slicing, name) else ""
        shown = value
        if key in ("slice_overhead", "slice_reserve"):
            shown = "auto" if value < 0 else str(value)
        blocks.append(f"# {meaning}\n{off}{key} = {_toml(shown)}\n")
    off = "# " if settings.state_dir == usual.state_dir else ""
    blocks.append(f"# Where the node's records are kept.\n{off}state_dir = {_toml(settings.state_dir)}\n")
    blocks.append("\n".join([_PROFILES, *_allowed(settings, gpus), ""]))
    return "\n".join(blocks)


def write(settings: Settings, gpus: Sequence[Gpu] = ()) -> None:
    """Replace `settings.config_path` by what `render` gives, readable to all, writable to its owner."""
    file = settings.config_path
    try:
        replace_whole(file, render(settings, gpus))
    except OSError as error:
        raise ConfigError(f"writing {file}: {error.strerror}") from error


def says(text: str, key: str) -> bool:
    """Whether a config.toml, one that is accepted, sets that key, for all nodes of its machine or for one."""
    parsed = tomllib.loads(text)
    return any(key in table for table in (parsed, *parsed.get("node", {}).values()))


def saying(text: str, key: str, value: str) -> str:
    """That config.toml with the key set too: where a comment shows it, else before the first table."""
    line = f"{key} = {_toml(value)}"
    shown = re.compile(rf"^# *{re.escape(key)} *=.*$", re.MULTILINE)
    if shown.search(text):
        return shown.sub(lambda _: line, text, count=1)
    table = re.search(r"^\[", text, re.MULTILINE)
    above, below = (text[: table.start()], text[table.start() :]) if table else (text, "")
    above += "" if above.endswith("\n") or not above else "\n"
    return f"{above}# {_KEYS[key][1]}\n{line}\n{below}"


def write_node_config(folder: Path | str, managed: Sequence[str] = ("*",), gpus: Sequence[Gpu] = ()) -> Settings:
    """Make `folder` a simulated node's: its config.toml and the folders of its locks and records."""
    settings = replace(config.defaults(node=folder), managed=tuple(managed))
    write(settings, gpus)
    try:
        make_folder(settings.run_dir)
        make_folder(settings.state_dir, 0o700)
    except OSError as error:
        raise ConfigError(f"making {error.filename}: {error.strerror}") from error
    return settings


def _managed(managed: tuple[str, ...], gpus: Sequence[Gpu]) -> Iterator[str]:
    if managed == ("*",):
        yield 'gpus = "*"'
        yield from (f"#   {gpu.uuid}  {_described(gpu)}" for gpu in gpus)
        return
    yield "gpus = ["
    for gpu in gpus:
        listed = [entry for entry in (gpu.uuid, gpu.pci_bus_id.lower()) if entry in managed]
        for entry in listed:
            yield f"    {_toml(entry)},  # {_described(gpu)}"
        if not listed:
            yield f"    # {_toml(gpu.uuid)},  # {_described(gpu)}"
    known = {gpu.uuid for gpu in gpus} | {gpu.pci_bus_id.lower() for gpu in gpus}
    for entry in managed:
        if entry not in known:
            yield f"    {_toml(entry)},"
    yield "]"


def _described(gpu: Gpu) -> str:
    return f"GPU {gpu.index}, {_printable(gpu.model)}"


def _allowed(settings: Settings, gpus: Sequence[Gpu]) -> Iterator[str]:
    allowed = settings.allowed
    if not allowed:
        menus = {gpu.model: tuple(p.name for p in gpu.profiles if not p.variant) for gpu in gpus if gpu.profiles}
        allowed = menus or {"NVIDIA A30": ("1g.6gb", "2g.12gb")}
    off = "" if settings.allowed else "# "
    yield f"{off}[profiles]"
    for model, names in allowed.items():
        yield f"{off}{_toml(model)} = [{', '.join(_toml(name) for name in names)}]"


def _toml(value: str | bool | float) -> str:
    """A TOML value; JSON's strings are TOML's but for DEL, which TOML wants escaped."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def _printable(text: str) -> str:
    return "".join(c for c in text if c.isprintable())
