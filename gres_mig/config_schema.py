"""What config.toml may say, and the one line that answers what it may not; only a changed file imports this."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from gres_mig.errors import BadRequest, ConfigError
from gres_mig.models import Settings
from gres_mig.sizes import parse_memory
from gres_mig.toml_lines import Lines
from gres_mig.values import Value, replace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_GPU_UUID = r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_PCI_ADDRESS = r"(?:([0-9a-f]{4}|[0-9a-f]{8}):)?([0-9a-f]{2}:[01][0-9a-f]\.[0-7])"


class _Complaint(Value):
    """What is wrong with the value at `path`; `written` tells its line in a list over several lines."""

    path: tuple[str, ...]
    found: str
    accepted: str
    hint: str = ""
    written: str = ""


class _Refused(ValueError):
    """A value that one of our own validators refuses; `path` leads to it below its key."""

    def __init__(self, found: object, accepted: str, *, path: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__(accepted)
        self.found = found
        self.accepted = accepted
        self.path = path
        self.hint = hint


def _gpus(value: object) -> tuple[str, ...]:
    accepted = '"*" for all, or a list of GPU UUIDs ("GPU-…") and PCI addresses ("0000:41:00.0")'
    if value == "*":
        return ("*",)
    if not isinstance(value, list):
        hint = f"write gpus = [{_toml(value)}]" if isinstance(value, str) and _is_gpu(value) else ""
        raise _Refused(value, accepted, hint=hint)
    for entry in value:
        if not isinstance(entry, str) or not _is_gpu(entry):
            raise _Refused(entry, f"in a list, {accepted.partition('list of ')[2]}", hint=_gpu_hint(entry))
    return tuple(dict.fromkeys(_as_nvml_writes_it(entry) for entry in value))


def _is_gpu(entry: str) -> bool:
    return re.fullmatch(_GPU_UUID, entry) is not None or re.fullmatch(_PCI_ADDRESS, entry.lower()) is not None


def _gpu_hint(entry: object) -> str:
    if not isinstance(entry, str):
        return "an index changes from boot to boot; nvidia-smi -L shows UUIDs" if isinstance(entry, int) else ""
    if entry == "*":
        return 'for all GPUs write gpus = "*"'
    if entry.startswith("MIG-"):
        return "that is a MIG device; name the GPU it is on"
    lower = "GPU-" + entry[4:].lower()
    return f"NVML writes it {lower}" if re.fullmatch(_GPU_UUID, lower) else ""


def _as_nvml_writes_it(entry: str) -> str:
    address = re.fullmatch(_PCI_ADDRESS, entry.lower())
    return f"{int(address[1] or '0', 16):08x}:{address[2]}" if address else entry


def _profiles(value: object) -> dict[str, tuple[str, ...]]:
    accepted = "a list of profile names"
    if not isinstance(value, dict):
        raise _Refused(value, 'a table, a line for each GPU model: "NVIDIA A30" = ["1g.6gb", "2g.12gb"]')
    for model, names in value.items():
        if not isinstance(names, list) or not names:
            raise _Refused(names, f"{accepted}, at least one", path=(model,))
        for name in names:
            if not isinstance(name, str) or not re.fullmatch(r"[!-~]+", name):
                hint = f"write {_toml(name[4:])}" if isinstance(name, str) and name.startswith("MIG ") else ""
                raise _Refused(name, f"{accepted}, such as 1g.24gb", path=(model,), hint=hint)
    return {model: tuple(dict.fromkeys(names)) for model, names in value.items()}


def _reserve(value: object) -> int:
    accepted = '"0", or a memory size in MiB or with K, M, G, such as "2G"'
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _Refused(value, accepted)
    if value in ("0", 0):
        return 0
    try:
        return parse_memory(str(value))
    except BadRequest as error:
        raise _Refused(value, accepted, hint=error.hint) from error


def _folder(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise _Refused(value, "a folder, absolute or relative to that of this file")
    return value


def _seconds(least: float, most: float) -> object:
    accepted = f"a number of seconds from {least:g} to {most:g}"
    return Field(ge=least, le=most, allow_inf_nan=False, description=accepted)


class _Config(BaseModel):
    """The keys of config.toml; `Settings` says what each means."""

    model_config = ConfigDict(extra="forbid", strict=True)

    gpus: Annotated[tuple[str, ...], BeforeValidator(_gpus)] = Settings.managed
    profiles: Annotated[dict[str, tuple[str, ...]], BeforeValidator(_profiles)] = {}
    placement: Literal["least-damage", "spread", "binpack"] = "least-damage"
    compute: Literal["most", "least"] = "most"
    upsize: bool = Field(Settings.upsize, description="true or false")
    reserve: Annotated[int, BeforeValidator(_reserve)] = Settings.reserve_mib
    mig_at_boot: bool = Field(Settings.mig_at_boot, description="true or false")
    bare: Literal["destroy", "quarantine"] = "destroy"
    bare_grace: Annotated[float, _seconds(0, 600)] = Settings.bare_grace_s
    hardware_timeout: Annotated[float, _seconds(0.1, 600)] = Settings.hardware_timeout_s
    lock_wait: Annotated[float, _seconds(0, 600)] = Settings.lock_wait_s
    in_use_wait: Annotated[float, _seconds(0, 60)] = Settings.in_use_wait_s
    aged: Annotated[float, _seconds(0, 604800)] = Settings.aged_s
    state_dir: Annotated[str, BeforeValidator(_folder)] = ""
    simulator: Annotated[str, BeforeValidator(_folder)] = ""


class _Section(_Config):
    """The keys of a `[node.NAME]` table: those of the file, and what no two nodes of one machine may share."""

    run_dir: Annotated[str, BeforeValidator(_folder)] = ""


KEYS = tuple(_Config.model_fields)
SECTION_KEYS = tuple(_Section.model_fields)
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def validate(text: str, defaults: Settings, name: str = "") -> Settings:
    """`defaults`, changed as the text of the file `defaults.config_path` says, in it the section of that name."""
    file = defaults.config_path
    parsed = _parsed(text, file)
    tables = parsed.pop("node", {})
    complaints: list[_Complaint] = []
    above = _checked(_Config, parsed, (), complaints)
    below = {each: _checked(_Section, table, ("node", each), complaints) for each, table in _named(tables, complaints)}
    if below and defaults.simulator:
        complaints.append(_Complaint(("node",), "sections", "none in the file of a simulated node"))
    if complaints:
        raise _first(complaints, text, file)
    if not below:
        return _settings(_Section.model_construct(**above), text, defaults)
    nodes = {
        each: _settings(_Section.model_construct(**{**above, **keys}), text, defaults) for each, keys in below.items()
    }
    if shared := list(_shared(nodes)):
        raise _first(shared, text, file)
    if name not in nodes:
        reason = f"there is no [node.{name}]" if name else "no node was named"
        raise ConfigError(f"{file}: {reason}; it is for the nodes {', '.join(nodes)}")
    return nodes[name]


def _checked(
    kind: type[_Config], table: dict[str, Any], path: tuple[str, ...], complaints: list[_Complaint]
) -> dict[str, Any]:
    """What a table sets, read; what is wrong with it goes to the complaints."""
    try:
        config = kind.model_validate(table)
    except ValidationError as error:
        complaints += [_explain(details, kind, path) for details in error.errors()]
        return {}
    return {key: getattr(config, key) for key in config.model_fields_set}


def _named(tables: object, complaints: list[_Complaint]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sections by the name of their node."""
    accepted = "a table for each node, [node.NAME], under its NodeName in slurm.conf"
    if not isinstance(tables, dict):
        complaints.append(_Complaint(("node",), _toml(tables), accepted))
        return
    for name, table in tables.items():
        if isinstance(table, dict) and _NODE_NAME.fullmatch(name):
            yield name, table
        else:
            found = _toml(table) if _NODE_NAME.fullmatch(name) else f"the name {_toml(name)}"
            complaints.append(_Complaint(("node", name), found, accepted))


def _shared(nodes: Mapping[str, Settings]) -> Iterator[_Complaint]:
    """Two nodes with the same records would take each other's instances for their own."""
    first: dict[str, str] = {}
    for name, settings in nodes.items():
        for key in ("state_dir", "run_dir"):
            folder = getattr(settings, key)
            if first.setdefault(folder, name) != name:
                accepted = "a state_dir and a run_dir, or a simulator, of its own"
                yield _Complaint(("node", name), f"the {key} of node {first[folder]}", accepted)


def _settings(config: _Section, text: str, defaults: Settings) -> Settings:
    file = defaults.config_path
    settings = replace(
        defaults,
        managed=config.gpus,
        allowed=config.profiles,
        placement=config.placement,
        compute=config.compute,
        upsize=config.upsize,
        reserve_mib=config.reserve,
        mig_at_boot=config.mig_at_boot,
        bare=config.bare,
        bare_grace_s=config.bare_grace,
        hardware_timeout_s=config.hardware_timeout,
        lock_wait_s=config.lock_wait,
        in_use_wait_s=config.in_use_wait,
        aged_s=config.aged,
    )
    beside = os.path.dirname(file)
    if config.simulator:
        folder = os.path.abspath(os.path.join(beside, config.simulator))
        if not defaults.simulator:
            state_dir, run_dir = os.path.join(folder, "state"), os.path.join(folder, "run")
            settings = replace(settings, simulator=folder, state_dir=state_dir, run_dir=run_dir)
        elif os.path.realpath(folder) != os.path.realpath(defaults.simulator):
            accepted = 'in the file of a simulated node, "." or no such key'
            raise _first([_Complaint(("simulator",), _toml(config.simulator), accepted)], text, file)
    for key in ("state_dir", "run_dir"):
        if folder := getattr(config, key):
            settings = replace(settings, **{key: os.path.abspath(os.path.join(beside, folder))})
    return settings


def _parsed(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{file}: not TOML: nested too deeply") from error
    except ValueError as error:
        # "Invalid value (at line 3, column 5)" or "… (at end of document)"; a huge number has no place at all.
        complaint, _, where = str(error).partition(" (at ")
        found = re.search(r"line (\d+)", where)
        line = int(found[1]) if found else text.rstrip().count("\n") + 1
        hint = 'write key = value, text in "quotes"' if complaint.startswith("Invalid") else ""
        if not isinstance(error, tomllib.TOMLDecodeError):
            complaint = "a number has too many digits"
        raise ConfigError(f"{file}:{line}: not TOML: {complaint}", hint=hint) from error


def _first(complaints: Sequence[_Complaint], text: str, file: str) -> ConfigError:
    """The complaint nearest to the top of the file: one line is what a person reads."""
    lines = Lines(text)
    line, complaint = min(((lines.find(c.path, c.written), c) for c in complaints), key=lambda pair: pair[0])
    key = ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else _toml(part) for part in complaint.path)
    message = f"{file}:{line}: {key}: found {complaint.found}; accepted: {complaint.accepted}"
    return ConfigError(message, hint=complaint.hint)


def _explain(details: ErrorDetails, kind: type[_Config], table: tuple[str, ...]) -> _Complaint:
    key = str(details["loc"][0])
    path = (*table, key)
    refused = details.get("ctx", {}).get("error")
    if isinstance(refused, _Refused):
        path += refused.path
        return _Complaint(path, _toml(refused.found), refused.accepted, refused.hint, _written(refused.found))
    field = kind.model_fields.get(key)
    if field is None:
        keys = tuple(kind.model_fields)
        return _Complaint(path, "an unknown key", ", ".join(keys), _did_you_mean(key, keys, str))
    found = details["input"]
    choices = get_args(field.annotation)
    accepted = field.description or " or ".join(_toml(choice) for choice in choices)
    return _Complaint(path, _toml(found), accepted, _did_you_mean(found, choices, _toml))


def _written(value: object) -> str:
    return value if isinstance(value, str) else str(value)


def _did_you_mean(found: object, choices: Sequence[object], shown: Callable[[str], str]) -> str:
    words = [choice for choice in choices if isinstance(choice, str)]
    close = get_close_matches(found.lower(), words, n=1) if isinstance(found, str) else []
    return f"did you mean {shown(close[0])}?" if close else ""


def _toml(value: object) -> str:
    """The value about as the file has it, in at most a line."""
    if isinstance(value, bool | str):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, Mapping):
        return "a table"
    elif isinstance(value, list):
        return "an empty list" if not value else "a list"
    else:
        text = str(value)
    printable = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return printable if len(printable) <= 80 else f"{printable[:38]}…{printable[-38:]}"
