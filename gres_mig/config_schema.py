"""What config.toml may say, and the one line that answers what it may not; only a changed file imports this."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from gres_mig import config_values as values
from gres_mig.errors import ConfigError
from gres_mig.models import Settings
from gres_mig.serving import Serving
from gres_mig.slice_models import Slicing
from gres_mig.toml_lines import Lines
from gres_mig.values import Value, replace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class _Complaint(Value):
    """What is wrong with the value at `path`; `written` tells its line in a list over several lines."""

    path: tuple[str, ...]
    found: str
    accepted: str
    hint: str = ""
    written: str = ""


class _Config(BaseModel):
    """The keys of config.toml; `Settings` says what each means."""

    model_config = ConfigDict(extra="forbid", strict=True)

    gpus: Annotated[tuple[str, ...], BeforeValidator(values.gpus)] = Settings.managed
    profiles: Annotated[dict[str, tuple[str, ...]], BeforeValidator(values.profiles)] = {}
    placement: Literal["least-damage", "spread", "binpack"] = "least-damage"
    compute: Literal["most", "least"] = "most"
    upsize: bool = Field(Settings.upsize, description="true or false")
    reserve: Annotated[int, BeforeValidator(values.memory)] = Settings.reserve_mib
    mig_at_boot: bool = Field(Settings.mig_at_boot, description="true or false")
    bare: Literal["destroy", "quarantine"] = "destroy"
    bare_grace: Annotated[float, values.seconds(0, 600)] = Settings.bare_grace_s
    hardware_timeout: Annotated[float, values.seconds(0.1, 600)] = Settings.hardware_timeout_s
    lock_wait: Annotated[float, values.seconds(0, 600)] = Settings.lock_wait_s
    in_use_wait: Annotated[float, values.seconds(0, 60)] = Settings.in_use_wait_s
    aged: Annotated[float, values.seconds(0, 604800)] = Settings.aged_s
    admission: Literal["count", "gates"] = "count"
    user_memory: Annotated[int, BeforeValidator(values.memory)] = Serving.memory_mib
    user_instances: Annotated[int, values.number(0, 1000)] = Serving.instances
    user_requests: Annotated[int, values.number(0, 10000)] = Serving.requests
    user_connections: Annotated[int, values.number(1, 64)] = Serving.connections
    metrics_port: Annotated[int, values.number(0, 65535)] = Serving.metrics_port
    dcgm_mapping: Annotated[str, BeforeValidator(values.folder_or_none)] = Settings.dcgm_mapping
    dcgm_whole_gpu: bool = Field(Settings.dcgm_whole_gpu, description="true or false")
    dcgm_sighup: Annotated[str, BeforeValidator(values.unit_or_pid_file)] = Settings.dcgm_sighup
    slices: Annotated[tuple[str, ...], BeforeValidator(values.slices)] = Slicing.gpus
    hami_core: Annotated[str, BeforeValidator(values.preloaded)] = Slicing.hami_core
    keep_umask: Annotated[str, BeforeValidator(values.preloaded)] = Slicing.keep_umask
    slice_overhead: Annotated[int, BeforeValidator(values.memory_or_auto)] = Slicing.overhead_mib
    slice_reserve: Annotated[int, BeforeValidator(values.memory_or_auto)] = Slicing.reserve_mib
    experimental_driver_limit: bool = Field(Slicing.driver_limit, description="true or false")
    over_grant: Literal["warn", "end"] = "warn"
    over_grant_after: Annotated[float, values.seconds(0, 86400)] = Slicing.over_grant_after_s
    state_dir: Annotated[str, BeforeValidator(values.folder)] = ""
    simulator: Annotated[str, BeforeValidator(values.folder)] = ""


class _Section(_Config):
    """The keys of a `[node.NAME]` table: those of the file, and what no two nodes of one machine may share."""

    run_dir: Annotated[str, BeforeValidator(values.folder)] = ""


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
        complaints.append(_Complaint(("node",), values.toml(tables), accepted))
        return
    for name, table in tables.items():
        if isinstance(table, dict) and _NODE_NAME.fullmatch(name):
            yield name, table
        else:
            found = values.toml(table) if _NODE_NAME.fullmatch(name) else f"the name {values.toml(name)}"
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
        admission=config.admission,
        serving=Serving(
            config.user_memory,
            config.user_instances,
            config.user_requests,
            config.user_connections,
            config.metrics_port,
        ),
        dcgm_whole_gpu=config.dcgm_whole_gpu,
        dcgm_sighup=config.dcgm_sighup,
        slicing=_slicing(config, text, file),
    )
    beside = os.path.dirname(file)
    if config.simulator:
        folder = os.path.abspath(os.path.join(beside, config.simulator))
        if not defaults.simulator:
            state_dir, run_dir = os.path.join(folder, "state"), os.path.join(folder, "run")
            settings = replace(settings, simulator=folder, state_dir=state_dir, run_dir=run_dir)
        elif os.path.realpath(folder) != os.path.realpath(defaults.simulator):
            accepted = 'in the file of a simulated node, "." or no such key'
            raise _first([_Complaint(("simulator",), values.toml(config.simulator), accepted)], text, file)
    for key in ("state_dir", "run_dir", "dcgm_mapping"):
        if folder := getattr(config, key):
            settings = replace(settings, **{key: os.path.abspath(os.path.join(beside, folder))})
    return settings


def _slicing(config: _Section, text: str, file: str) -> Slicing:
    for gpu in config.slices:
        if gpu != "*" and gpu in config.gpus:
            found = f"{gpu}, which gpus has too"
            raise _first([_Complaint(("slices",), found, "a GPU is shared by slices or divided by MIG")], text, file)
    return Slicing(
        config.slices,
        config.hami_core,
        config.keep_umask,
        config.slice_overhead,
        config.slice_reserve,
        config.experimental_driver_limit,
        config.over_grant,
        config.over_grant_after,
    )


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
    key = ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else values.toml(part) for part in complaint.path)
    message = f"{file}:{line}: {key}: found {complaint.found}; accepted: {complaint.accepted}"
    return ConfigError(message, hint=complaint.hint)


def _explain(details: ErrorDetails, kind: type[_Config], table: tuple[str, ...]) -> _Complaint:
    key = str(details["loc"][0])
    path = (*table, key)
    refused = details.get("ctx", {}).get("error")
    if isinstance(refused, values.Refused):
        path += refused.path
        return _Complaint(
            path, values.toml(refused.found), refused.accepted, refused.hint, values.written(refused.found)
        )
    field = kind.model_fields.get(key)
    if field is None:
        keys = tuple(kind.model_fields)
        close = _did_you_mean(key, keys, str)
        return _Complaint(path, "an unknown key", "those in docs/config.md" if close else ", ".join(keys), close)
    found = details["input"]
    choices = get_args(field.annotation)
    accepted = field.description or " or ".join(values.toml(choice) for choice in choices)
    return _Complaint(path, values.toml(found), accepted, _did_you_mean(found, choices, values.toml))


def _did_you_mean(found: object, choices: Sequence[object], shown: Callable[[str], str]) -> str:
    words = [choice for choice in choices if isinstance(choice, str)]
    close = get_close_matches(found.lower(), words, n=1) if isinstance(found, str) else []
    return f"did you mean {shown(close[0])}?" if close else ""
