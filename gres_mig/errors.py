"""What can go wrong, and whose fault it is; front ends look at `error.fault` and at nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Fault(Enum):
    """Whose fault an error is; the exit code of every front end follows from it."""

    REQUEST = "request"
    CAPACITY = "capacity"
    NODE = "node"

    @property
    def exit_code(self) -> int:
        """2 request, 3 capacity, 4 node."""
        return {Fault.REQUEST: 2, Fault.CAPACITY: 3, Fault.NODE: 4}[self]

    @property
    def http_status(self) -> int:
        """400 request, 503 capacity, 500 node."""
        return {Fault.REQUEST: 400, Fault.CAPACITY: 503, Fault.NODE: 500}[self]


class GresMigError(Exception):
    """One line for a person, the next step if there is one, and who is in the way.

    `code` is a short stable word for programs; `blockers` are owners or descriptions of what is in the way.
    """

    fault = Fault.NODE
    code = "INTERNAL"

    def __init__(self, message: str, *, hint: str = "", blockers: Sequence[str] = (), code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.blockers = tuple(blockers)
        self.code = code or type(self).code

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross from the child that works on the hardware to its parent, whatever their constructors take.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[GresMigError], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> GresMigError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(attributes)
    return error


class BadRequest(GresMigError):
    """The request can never be served as it stands: a size no board holds, an owner that is not one."""

    fault = Fault.REQUEST
    code = "BADREQ"


class TooBig(BadRequest):
    """More memory than the largest allowed profile of any managed GPU holds."""

    code = "TOOBIG"


class Conflict(BadRequest):
    """The owner already holds something else, or the place already belongs to a record."""

    code = "CONFLICT"


class NotPermitted(BadRequest):
    """The caller may not do this on this node; nothing was changed."""

    code = "NOPERM"


class NotFound(BadRequest):
    """The caller has nothing of that name; another's is answered the same."""

    code = "NOTFOUND"


class NoCapacity(GresMigError):
    """No place now; the same request may succeed when something ends."""

    fault = Fault.CAPACITY
    code = "NOCAP"


class Quota(NoCapacity):
    """The caller has as much as one user may have on this node."""

    code = "QUOTA"


class Busy(NoCapacity):
    """Another operation holds what this one needs, or a client keeps a GPU from changing."""

    code = "BUSY"


class NodeFault(GresMigError):
    """The node cannot do its work: driver, state file or configuration; an admin has to look."""

    fault = Fault.NODE
    code = "NVML"


class TimedOut(NodeFault):
    """A driver call did not return in time; its GPU is fenced."""

    code = "TIMEOUT"


class StateError(NodeFault):
    """The record file cannot be read, trusted or written."""

    code = "STATE"


class ConfigError(NodeFault):
    """The configuration names something that is not accepted; the message says file, line and key."""

    code = "CONFIG"
