"""The values of config.toml: what each kind accepts, and how one that is refused is shown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from pydantic import Field

from gres_mig.errors import BadRequest
from gres_mig.sizes import parse_memory

_GPU_UUID = r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_PCI_ADDRESS = r"(?:([0-9a-f]{4}|[0-9a-f]{8}):)?([0-9a-f]{2}:[01][0-9a-f]\.[0-7])"


class Refused(ValueError):
    """A value that one of our own validators refuses; `path` leads to it below its key."""

    def __init__(self, found: object, accepted: str, *, path: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__(accepted)
        self.found = found
        self.accepted = accepted
        self.path = path
        self.hint = hint


def gpus(value: object) -> tuple[str, ...]:
    accepted = '"*" for all, or a list of GPU UUIDs ("GPU-…") and PCI addresses ("0000:41:00.0")'
    if value == "*":
        return ("*",)
    if not isinstance(value, list):
        hint = f"write gpus = [{toml(value)}]" if isinstance(value, str) and _is_gpu(value) else ""
        raise Refused(value, accepted, hint=hint)
    for entry in value:
        if not isinstance(entry, str) or not _is_gpu(entry):
            raise Refused(entry, f"in a list, {accepted.partition('list of ')[2]}", hint=_gpu_hint(entry))
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


def profiles(value: object) -> dict[str, tuple[str, ...]]:
    accepted = "a list of profile names"
    if not isinstance(value, dict):
        raise Refused(value, 'a table, a line for each GPU model: "NVIDIA A30" = ["1g.6gb", "2g.12gb"]')
    for model, names in value.items():
        if not isinstance(names, list) or not names:
            raise Refused(names, f"{accepted}, at least one", path=(model,))
        for name in names:
            if not isinstance(name, str) or not re.fullmatch(r"[!-~]+", name):
                hint = f"write {toml(name[4:])}" if isinstance(name, str) and name.startswith("MIG ") else ""
                raise Refused(name, f"{accepted}, such as 1g.24gb", path=(model,), hint=hint)
    return {model: tuple(dict.fromkeys(names)) for model, names in value.items()}


def memory(value: object) -> int:
    accepted = '"0", or a memory size in MiB or with K, M, G, such as "2G"'
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Refused(value, accepted)
    if value in ("0", 0):
        return 0
    try:
        return parse_memory(str(value))
    except BadRequest as error:
        raise Refused(value, accepted, hint=error.hint) from error


def folder(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise Refused(value, "a folder, absolute or relative to that of this file")
    return value


def slices(value: object) -> tuple[str, ...]:
    try:
        return gpus(value)
    except Refused as error:
        hint = error.hint.replace("write gpus = ", "write slices = ").replace("for all GPUs write gpus", "write slices")
        accepted = str(error).replace('"*" for all', '"*" for all GPUs without MIG')
        raise Refused(error.found, accepted, hint=hint) from error


def memory_or_auto(value: object) -> int:
    if value == "auto":
        return -1
    try:
        return memory(value)
    except Refused as error:
        raise Refused(value, f'"auto", {error}', hint=error.hint) from error


def preloaded(value: object) -> str:
    # What is named here goes into LD_PRELOAD, which has no way to quote: blanks and colons part its entries, and the
    # loader expands a dollar sign.
    accepted = "the absolute path of a library, without blanks, colons or dollar signs"
    if not isinstance(value, str) or not re.fullmatch(r"(/[^\s:$]+)?", value) or not value.isprintable():
        raise Refused(value, accepted)
    return value


def folder_or_none(value: object) -> str:
    return "" if value == "" else folder(value)


def unit_or_pid_file(value: object) -> str:
    # A unit of systemd's, or a file whose place does not depend on where config.toml is.
    pattern = r"|[A-Za-z0-9:_.@-]+\.service|/[^\0]*[^\0/]"
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise Refused(value, 'a unit such as "dcgm-exporter.service", or the absolute path of a pid file')
    return value


def seconds(least: float, most: float) -> object:
    accepted = f"a number of seconds from {least:g} to {most:g}"
    return Field(ge=least, le=most, allow_inf_nan=False, description=accepted)


def number(least: int, most: int) -> object:
    return Field(ge=least, le=most, description=f"a whole number from {least} to {most}")


def written(value: object) -> str:
    return value if isinstance(value, str) else str(value)


def toml(value: object) -> str:
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
