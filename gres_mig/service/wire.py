"""What goes over the socket: requests as they may be, answers as they are; docs/openapi.json is made from it."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gres_mig.errors import BadRequest
from gres_mig.models import Request
from gres_mig.sizes import parse_memory


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Ask(_Asked):
    """What an instance shall hold: a size of memory, or a profile by name; one of the two."""

    memory: int | str | None = Field(None, description="MiB, or a size such as `8G`")
    profile: str | None = Field(None, description="a profile by name, such as `1g.24gb`", max_length=64)

    def request(self) -> Request:
        """The same as the allocator understands it."""
        if (self.memory is None) == (self.profile is None):
            raise BadRequest("ask for a memory size or for a profile, one of the two", hint='such as {"memory": "8G"}')
        if self.profile is not None and not re.fullmatch(r"[!-~]+", self.profile):
            raise BadRequest(f"{self.profile!r} is no name of a profile", hint="see: gres-mig profiles")
        return Request(0 if self.memory is None else parse_memory(str(self.memory)), self.profile or "")


class Report(_Asked):
    """Which process the kernel is."""

    pid: int = Field(ge=1, lt=2**31, description="as the caller counts processes, in its own pid namespace")


class _Answer(BaseModel):
    # What a newer part of gres-mig adds goes through.
    model_config = ConfigDict(extra="allow")

    # Named so on the wire, as in every other JSON of gres-mig.
    schema_: int = Field(1, alias="schema", description="raised when a field goes away or changes its meaning")


class Profile(BaseModel):
    """A profile of some GPU; the id means nothing without the GPU."""

    id: int
    name: str
    memory_mib: int


class Placement(BaseModel):
    """Start and size, in memory slices."""

    start: int
    size: int


class Process(BaseModel):
    """A process, as this host counts them."""

    pid: int


class Kernel(_Answer):
    """What one kernel has, or what is left of it."""

    kernel_id: str
    owner: str = Field(description="`jupyter:UID:KERNEL`, the uid being the caller's")
    state: Literal["allocated", "stuck", "lost", "reclaiming"]
    since: float
    requested_mib: int | None = None
    requested_profile: str | None = None
    profile: Profile
    placement: Placement
    gpu_uuid: str
    gi_id: int | None = None
    ci_id: int | None = None
    mig_uuid: str | None = None
    isolation: str | None = None
    boot_id: str | None = None
    server: Process | None = None
    kernel: Process | None = None
    environment: dict[str, str] = Field(description="what the kernel's process is to be started with")
    created: bool = Field(False, description="whether this request made it")


class Kernels(_Answer):
    """All that the caller's kernels have."""

    kernels: list[Kernel]


class Outcome(BaseModel):
    """What became of an instance."""

    gpu_uuid: str
    profile: str
    verdict: Literal["released", "gone", "foreign", "stuck", "waiting", "lost"]
    reason: str


class Reclaimed(_Answer):
    """What became of what a kernel had; empty where that was nothing."""

    reclaimed: list[Outcome]


class Size(BaseModel):
    """A size of one model of GPU, and how many of it could be made now."""

    profile: str
    memory_mib: int
    model: str
    free: int


class Sizes(_Answer):
    """The sizes of this node, as last published."""

    looked: float | None = Field(description="when the hardware was last looked at")
    sizes: list[Size]


class Why(_Answer):
    """Whether a request would find a place now, and what is in the way."""

    fits: bool
    code: str | None
    text: str


class Config(BaseModel):
    """The configuration in force."""

    path: str
    sha256: str | None = Field(description="of the file's text; null where there is no file")
    loaded: float
    error: str | None = Field(description="why the last reload changed nothing")


class Limits(BaseModel):
    """What one user may have; 0 is no limit."""

    user_memory_mib: int
    user_instances: int
    user_requests: int
    user_connections: int


class Service(_Answer):
    """The service itself."""

    version: str
    pid: int
    started: float
    config: Config
    limits: Limits


class Health(_Answer):
    """The node could be looked at just now."""

    gpus: int = Field(description="managed GPUs")
    closed: int = Field(description="of these, how many take no new work")
    looked: float


class ErrorBody(BaseModel):
    """Whose fault it is, and what to do."""

    fault: Literal["request", "capacity", "node"]
    code: str
    message: str
    hint: str
    blockers: list[str]


class Error(_Answer):
    """Why there is no other answer."""

    error: ErrorBody


def read(kind: type[Ask | Report], body: bytes) -> Any:
    """The request in a body; `BadRequest` with the first thing that is wrong with it."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"][:1])
        fields = ", ".join(kind.model_fields)
        message = f"the body{f', {where}' if where else ''}: {first['msg']}"
        raise BadRequest(message, hint=f"it is a JSON object with {fields}") from error
