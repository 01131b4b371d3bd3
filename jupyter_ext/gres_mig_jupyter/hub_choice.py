"""What a person may choose when JupyterHub starts a server: the form, and the only reader of `user_options`."""

from __future__ import annotations

import html
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jupyterhub.spawner import SpawnException
from jupyterhub.utils import maybe_future
from traitlets import Integer, List, TraitError, default, validate
from traitlets.config import LoggingConfigurable

from gres_mig.errors import BadRequest, GresMigError, TooBig
from gres_mig.sizes import format_mib
from gres_mig.values import Value

MEMORY = "gpu_memory"


class Size(Value):
    """An instance's memory, as the form offers it."""

    memory_mib: int
    profiles: tuple[str, ...]
    free: int | None = None
    """How many could be made now; None where nobody can say."""


class Refused(SpawnException):  # type: ignore[misc]  # JupyterHub has no types
    """A server that is not started, and why; unlike other errors of 500 and more, these never make a Hub give up."""

    def __init__(self, error: GresMigError) -> None:
        super().__init__(str(error), reason=error.code.lower(), status_code=error.fault.http_status)
        # What the form's page shows; without it that would be str(), which has the class's name in it.
        self.jupyterhub_message = str(error)


# Not of Spawner: JupyterHub takes as its subclass only what can start something, which is what this is put before.
_Spawner: Any = LoggingConfigurable


class GpuChoice(_Spawner):  # type: ignore[misc]
    """What offers GPU memory, put before a spawner; it hands on nothing of `user_options` that it has not checked.

    The site's own form, `options_from_form` and `apply_user_options` go on working for the site's own fields.
    """

    gpu_memory_choices = List(
        Integer(min=1), help="Sizes to offer, in MiB; by default those of the instances that can be made."
    ).tag(config=True)

    gpu_memory_default = Integer(
        0, min=0, help="MiB for servers whose user says nothing about it; 0: their kernels get no instance unasked."
    ).tag(config=True)

    gpu_memory = Integer(0, min=0, max=9_999_999, help="MiB that was chosen for this server; 0: none.")

    gpu_options: tuple[str, ...] = (MEMORY,)
    """The keys of `user_options` that are ours."""

    async def gpu_sizes(self) -> Sequence[Size]:
        """What can be had, smallest first."""
        raise NotImplementedError

    async def choose_gpu(self, options: Mapping[str, object]) -> None:
        """Take what was chosen, if it can be had; `options` has no other keys than ours."""
        memory_mib = _memory_mib(options.get(MEMORY, self.gpu_memory_default))
        if memory_mib:
            _refuse_if_not_offered(memory_mib, await self._offered(), narrowed=bool(self.gpu_memory_choices))
        self.gpu_memory = memory_mib

    def gpu_fields(self, sizes: Sequence[Size]) -> str:
        """The form's fields as HTML, with nothing in it that is not escaped."""
        return select(
            MEMORY,
            "GPU memory",
            [("", "none"), *((str(size.memory_mib), _label(size)) for size in sizes)],
            str(self.gpu_memory_default or ""),
            "What each notebook is given that does not ask for GPU memory itself.",
        )

    async def get_options_form(self) -> str:
        """Our fields, then the site's own form."""
        try:
            ours = self.gpu_fields(await self._offered())
        except GresMigError as error:
            self.log.error("the form shows no GPU sizes: %s", error)
            # The first half: what is to be done about it is for the admin, who finds it in the Hub's log.
            ours = f'<p role="status" class="text-muted">No GPU memory can be chosen now: {_text(error.message)}.</p>'
        return ours + str(await super().get_options_form() or "")

    def run_options_from_form(self, form_data: dict[str, Any]) -> dict[str, Any]:
        """Our fields as single values; the others as the site's `options_from_form` makes them."""
        ours, others = self._split(form_data)
        return {**super().run_options_from_form(others), **ours}

    def options_from_query(self, query_data: dict[str, Any]) -> dict[str, Any]:
        """The same for an address such as `/hub/spawn?opt-gpu_memory=8000`."""
        ours, others = self._split(query_data)
        return {**super().options_from_query(others), **ours}

    def get_env(self) -> dict[str, str]:
        """With GPU memory chosen, every kernel whose spec says nothing else is started by our provisioner."""
        env = dict(super().get_env())
        if self.gpu_memory:
            env["JUPYTER_DEFAULT_PROVISIONER_NAME"] = "gres-mig"
        return env

    def get_state(self) -> dict[str, Any]:
        """The choice goes into the Hub's database, and is not cleared with the state: poll() does that too early."""
        return {**super().get_state(), MEMORY: self.gpu_memory}

    def load_state(self, state: dict[str, Any]) -> None:
        """After the Hub was restarted."""
        super().load_state(state)
        self.gpu_memory = state.get(MEMORY, self.gpu_memory)

    @default("apply_user_options")
    def _ours(self) -> Callable[..., Any]:
        return _apply

    @validate("apply_user_options")
    def _ours_first(self, proposal: Any) -> Callable[..., Any]:
        theirs = proposal.value
        if theirs is None or theirs is _apply:
            return _apply
        if not callable(theirs):
            raise TraitError("apply_user_options: with GPU memory on offer it has to be a function, not a dictionary")

        async def both(spawner: GpuChoice, options: dict[str, Any]) -> None:
            await _apply(spawner, options, theirs)

        return both

    async def _offered(self) -> Sequence[Size]:
        sizes = await self.gpu_sizes()
        if not self.gpu_memory_choices:
            return sizes
        chosen = []
        for memory_mib in sorted(self.gpu_memory_choices):
            held = next((size for size in sizes if size.memory_mib >= memory_mib), None)
            if held is None:
                self.log.warning("gpu_memory_choices: no instance here holds %s", format_mib(memory_mib))
            else:
                chosen.append(Size(memory_mib, held.profiles, held.free))
        return chosen

    def _split(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        ours = {name: fields[name] for name in self.gpu_options if name in fields}
        single = {name: v[0] if isinstance(v, list) and len(v) == 1 else v for name, v in ours.items()}
        # _xsrf: the Hub's own, which some clients send in the body.
        return single, {name: v for name, v in fields.items() if name not in ours and name != "_xsrf"}


async def _apply(
    spawner: GpuChoice, options: Mapping[str, Any], theirs: Callable[[GpuChoice, dict[str, Any]], Any] | None = None
) -> None:
    ours = {name: value for name, value in options.items() if name in spawner.gpu_options}
    others = {name: value for name, value in options.items() if name not in ours}
    try:
        if others and theirs is None:
            known = " and ".join(spawner.gpu_options)
            raise BadRequest(f"option {reprlib.repr(next(iter(others)))}: there is no such option", hint=f"use {known}")
        await spawner.choose_gpu(ours)
    except GresMigError as error:
        raise Refused(error) from error
    if theirs is not None:
        await maybe_future(theirs(spawner, others))


def _memory_mib(value: object) -> int:
    """MiB; 0 where none was chosen. Neither a sign nor a unit, nor digits of other scripts, that a shell might see."""
    if value is None or value == "":
        return 0
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{1,7}", value):
        raise BadRequest(
            f"{MEMORY} {reprlib.repr(value)}: it is not a number of MiB", hint="write up to seven digits, such as 8000"
        )
    return int(value)


def _refuse_if_not_offered(memory_mib: int, sizes: Sequence[Size], *, narrowed: bool) -> None:
    offered = ", ".join(str(size.memory_mib) for size in sizes)
    hint = f"choose one of these, in MiB: {offered}" if offered else "start the server without it"
    if not sizes or memory_mib > sizes[-1].memory_mib:
        raise TooBig(f"{MEMORY} {memory_mib}: no instance holds that here", hint=hint)
    # What lies between two sizes gets the larger one, as everywhere else, unless the site named what it offers.
    if narrowed and all(memory_mib != size.memory_mib for size in sizes):
        raise BadRequest(f"{MEMORY} {memory_mib}: it is not offered here", hint=hint)


def _label(size: Size) -> str:
    free = "" if size.free is None else f", {size.free or 'none'} free now"
    return f"{format_mib(size.memory_mib)} ({', '.join(size.profiles)}){free}"


def select(name: str, label: str, choices: Sequence[tuple[str, str]], chosen: str, explanation: str) -> str:
    """A labelled field of the form, in the classes of JupyterHub's own pages."""
    options = "".join(
        f'<option value="{_text(value)}"{" selected" if value == chosen else ""}>{_text(shown)}</option>'
        for value, shown in choices
    )
    return (
        f'<div class="mb-3"><label class="form-label" for="{name}">{_text(label)}</label>'
        f'<select class="form-select" id="{name}" name="{name}" aria-describedby="{name}-help">{options}</select>'
        f'<div class="form-text" id="{name}-help">{_text(explanation)}</div></div>'
    )


def _text(text: str) -> str:
    return html.escape(text, quote=True)
