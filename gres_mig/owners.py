"""The grammar of owners: `slurm:CLUSTER:JOBID`, `jupyter:UID:KERNEL` or `manual:NAME`."""

from __future__ import annotations

import re
from reprlib import Repr

from gres_mig.errors import BadRequest
from gres_mig.models import Owner

_NAME = (r"[A-Za-z0-9_.-]{1,64}", "1 to 64 of the characters A-Z a-z 0-9 _ . -")
_JOB_ID = (r"[1-9][0-9]{0,9}", "a number of at most 10 digits that does not start with 0")
_UID = (r"0|[1-9][0-9]{0,9}", "a user id, such as 1000")
_KERNEL = (r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", "a UUID in lower case, as Jupyter shows it")

_GRAMMAR = {
    "slurm": (("the cluster", *_NAME), ("the job id", *_JOB_ID)),
    "jupyter": (("the uid", *_UID), ("the kernel", *_KERNEL)),
    "manual": (("the name", *_NAME),),
}
_NO_UID = 2**32 - 1
"""(uid_t) -1, which is no user to the kernel of the operating system."""

_FORMS = "an owner is slurm:CLUSTER:JOBID, jupyter:UID:KERNEL or manual:NAME"


def parse_owner(text: str, *, uid: int = 0, submitted: int = 0) -> Owner:
    """The owner that `text` names; `uid` and `submitted` are what else the caller knows of a Slurm job.

    A Jupyter owner's uid is the one in its name.
    """
    kind, *parts = text.split(":")
    grammar = _GRAMMAR.get(kind)
    if grammar is None:
        raise BadRequest(f"owner {_quoted(text)}: {_quoted(kind)} is no kind of owner", hint=_FORMS)
    if len(parts) != len(grammar):
        raise BadRequest(f"owner {_quoted(text)}: {kind} takes {len(grammar)} parts, not {len(parts)}", hint=_FORMS)
    for part, (what, pattern, rule) in zip(parts, grammar, strict=True):
        if not re.fullmatch(pattern, part) or (what == "the uid" and int(part) >= _NO_UID):
            raise BadRequest(f"owner {_quoted(text)}: {what} {_quoted(part)} is not {rule}")
    return Owner(text, int(parts[0]) if kind == "jupyter" else uid, submitted)


def _quoted(text: str) -> str:
    shown = Repr()
    shown.maxstring = 90
    return shown.repr(text)
