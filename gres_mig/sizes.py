"""Memory sizes: as people write them, and as they are shown."""

from __future__ import annotations

import re
import reprlib

from gres_mig.errors import BadRequest

MAX_MIB = 2**31
"""More than any board to come; what is larger is a slip of the finger."""

_KIB_PER = {"": 1024, "K": 1, "KIB": 1, "M": 1024, "MIB": 1024, "G": 1024**2, "GIB": 1024**2}
_GROUPED = r"[0-9]{1,3}([_,'][0-9]{3})+[A-Za-z]*"
_EXAMPLES = "write MiB, such as 8000, or a binary size, such as 8G (8,192 MiB)"


def parse_memory(text: str) -> int:
    """MiB of a size such as `8000`, `8G` or `8192MiB`; units are powers of 1024, in either case.

    `8K` is 8 KiB here, and refused: only Slurm's `migmem` counts `8K` as 8,192.
    """
    match = re.fullmatch(r"([0-9]+)([A-Za-z]*)", text)
    if match is None:
        raise _refusal(text, _objection(text), _correction(text))
    number, unit = match.groups()
    per_unit = _KIB_PER.get(unit.upper())
    if per_unit is None:
        raise _refusal(text, f"{unit[:10]} is not a unit", "units are K, M, G or KiB, MiB, GiB, powers of 1024")
    digits = number.lstrip("0")
    if not digits:
        raise _refusal(text, "nothing is asked for")
    # Compared by length first: Python refuses to turn more than 4,300 digits into a number.
    if len(digits) > len(str(MAX_MIB * 1024)) or int(digits) * per_unit > MAX_MIB * 1024:
        raise _refusal(text, f"it is more than {format_mib(MAX_MIB)}")
    mib, kib = divmod(int(digits) * per_unit, 1024)
    if kib:
        nearest = max(1, mib + (kib >= 512))
        slurm = f"; what Slurm's migmem counts as {digits}K is {digits}G here" if not mib else ""
        raise _refusal(text, "it is not a whole number of MiB", f"the nearest is {nearest}{slurm}")
    if digits != number:
        raise _refusal(text, "it starts with a zero", f"write {digits}{unit}")
    return mib


def format_mib(mib: int) -> str:
    """`8,192 MiB`."""
    return f"{mib:,} MiB"


def _refusal(text: str, objection: str, hint: str = "") -> BadRequest:
    return BadRequest(f"memory size {reprlib.repr(text)}: {objection}", hint=hint or _EXAMPLES)


def _objection(text: str) -> str:
    if not text:
        return "it is empty"
    if any(c.isspace() for c in text):
        return "it has a space in it"
    if text[0] in "+-":
        return "it has a sign"
    if re.fullmatch(r"[0-9]*\.[0-9]*[A-Za-z]*", text):
        return "it is not a whole number"
    if any(c.isdecimal() and not c.isascii() for c in text):
        return "only the digits 0 to 9 are accepted"
    if re.fullmatch(_GROUPED, text):
        return "digits are not grouped here"
    return "it is not a number of MiB"


def _correction(text: str) -> str:
    """What the writer most likely meant, if that is a size."""
    fraction = re.fullmatch(r"([0-9]{1,7})\.([0-9]{1,9})([MmGg])(?:[Ii][Bb])?", text)
    if fraction:
        whole, decimals, unit = fraction.groups()
        scale = 10 ** len(decimals)
        # Rounded up: a little more memory serves the asker, a little less may not.
        mib = -(-int(whole + decimals) * _KIB_PER[unit.upper()] // (1024 * scale))
        return f"write {mib}" if 0 < mib <= MAX_MIB else ""
    plain = "".join(str(int(c)) if c.isdecimal() else c for c in text[:40].strip().removeprefix("+"))
    plain = re.sub(r"(?<=[0-9]) +(?=[A-Za-z])", "", plain)
    if re.fullmatch(_GROUPED, plain):
        plain = re.sub(r"[_,']", "", plain)
    if plain == text or not re.fullmatch(r"[1-9][0-9]{0,9}[A-Za-z]*", plain):
        return ""
    try:
        parse_memory(plain)
    except BadRequest:
        return ""
    return f"write {plain}"
