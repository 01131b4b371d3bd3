"""`gres-mig kernelspec`: kernels with GPU memory in Jupyter's launcher."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from gres_mig import explain, placement, slices
from gres_mig.answers import emit
from gres_mig.cli import Node, json_option, pass_node
from gres_mig.errors import BadRequest, NodeFault, TooBig
from gres_mig.look import look
from gres_mig.models import Gpu, Request, Settings
from gres_mig.sizes import format_mib, parse_memory
from gres_mig.view import View

if TYPE_CHECKING:
    from gres_mig_jupyter.kernelspec import Spec, Wanted


def _where(command: Any) -> Any:
    for option in (
        click.option("--user", is_flag=True, help="For yourself; that is so for all but root."),
        click.option("--sys-prefix", is_flag=True, help="In the environment of this gres-mig."),
        click.option("--prefix", metavar="DIR", help="Below this folder, in share/jupyter/kernels."),
    ):
        command = option(command)
    return command


@click.group(no_args_is_help=False)
def kernelspec() -> None:
    """Put kernels with GPU memory into Jupyter's launcher, and take them out again."""


@kernelspec.command()
@click.option("--memory", "memories", multiple=True, metavar="SIZE", help="MiB, or 8G; may be given again.")
@click.option("--profile", "profiles", multiple=True, metavar="NAME", help="A profile by name; may be given again.")
@click.option("--all-profiles", is_flag=True, help="One for each size this node has.")
@click.option("--from", "base", metavar="NAME", default="python3", show_default=True, help="The spec it is made from.")
@click.option(
    "--cull-after", metavar="S", type=click.IntRange(min=1), help="Seconds idle after which a server may end it."
)
@_where
@json_option
@pass_node
def install(
    node: Node,
    memories: tuple[str, ...],
    profiles: tuple[str, ...],
    all_profiles: bool,
    base: str,
    cull_after: int | None,
    user: bool,
    sys_prefix: bool,
    prefix: str | None,
    as_json: bool,
) -> None:
    """Install a kernel for each size that is named; one that is there already stays as it is."""
    specs = _specs()
    if not memories and not profiles and not all_profiles:
        raise BadRequest("no size was named", hint="such as: --memory 8G, or --all-profiles")
    settings = node.settings
    view = look(settings)
    there = sorted({mib for gpu in view.gpus if settings.manages(gpu) for mib in _sizes_mib(gpu, settings)})
    if all_profiles and not there:
        why = next((gpu.trouble for gpu in view.gpus if settings.manages(gpu)), "no GPU of it is managed")
        raise NodeFault(f"this node has no sizes to offer: {why}", hint="see: gres-mig doctor", code="CONFIG")
    requests = [Request(parse_memory(memory)) for memory in memories]
    requests += [Request(0, name.lower()) for name in profiles]
    requests += [Request(memory_mib) for memory_mib in there if all_profiles]
    for request in requests:
        _refuse_what_nobody_could_have(request, view, settings, there)
    asked = [specs.Wanted(request.memory_mib, request.profile, cull_after or 0) for request in requests]
    kernels = specs.place(user=_one(user, sys_prefix, prefix), prefix=sys.prefix if sys_prefix else prefix or "")
    made = [specs.install(base, wanted, kernels) for wanted in dict.fromkeys(asked)]
    lines = [f"{spec.title}: {spec.folder}{' (already)' if spec.state == 'unchanged' else ''}" for spec in made]
    emit({"kernelspecs": [{**_plain(spec), "state": spec.state} for spec in made]}, "\n".join(lines), as_json=as_json)


@kernelspec.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """Show the kernels that gres-mig installed."""
    found = _specs().installed()
    width = max((len(spec.name) for spec in found), default=0)
    lines = [f"{spec.name:{width}}  {spec.title}  {spec.folder}" for spec in found]
    emit({"kernelspecs": [_plain(spec) for spec in found]}, "\n".join(lines) or "none", as_json=as_json)


@kernelspec.command()
@click.argument("names", nargs=-1, metavar="[NAME]…")
@click.option("--all", "everything", is_flag=True, help="All that gres-mig installed.")
@_where
@json_option
def remove(
    names: tuple[str, ...], everything: bool, user: bool, sys_prefix: bool, prefix: str | None, as_json: bool
) -> None:
    """Remove kernels that gres-mig installed, and no others; those that are gone are no error."""
    specs = _specs()
    if everything is bool(names):
        raise BadRequest("name kernels to remove, or --all", hint="see: gres-mig kernelspec list")
    anywhere = not (user or sys_prefix or prefix)
    kernels = specs.place(user=_one(user, sys_prefix, prefix), prefix=sys.prefix if sys_prefix else prefix or "")
    gone = [spec for spec in specs.installed([] if anywhere else [kernels]) if everything or spec.name in names]
    for spec in gone:
        specs.remove(spec)
    lines = [f"removed {spec.title}: {spec.folder}" for spec in gone]
    emit({"kernelspecs": [_plain(spec) for spec in gone]}, "\n".join(lines) or "none there", as_json=as_json)


def _specs() -> Any:
    try:
        from gres_mig_jupyter import kernelspec as specs
    except ModuleNotFoundError as error:
        raise NodeFault(
            f"the environment of this gres-mig has no Jupyter: {error.name} is missing",
            hint="run in a clone of gres-mig, with the pip of Jupyter: pip install '.[jupyter]'",
            code="CONFIG",
        ) from error
    return specs


def _one(user: bool, sys_prefix: bool, prefix: str | None) -> bool:
    if [user, sys_prefix, prefix is not None].count(True) > 1:
        raise BadRequest("--user, --sys-prefix and --prefix are different places", hint="name one of them")
    return user


def _sizes_mib(gpu: Gpu, settings: Settings) -> Iterator[int]:
    if gpu.sliced and not gpu.trouble:
        yield from slices.sizes_mib(slices.capacity_mib(gpu, settings), slices.overhead_mib(gpu, settings))
    yield from (profile.memory_mib for profile in placement.allowed(gpu, settings))


def _refuse_what_nobody_could_have(request: Request, view: View, settings: Settings, there: list[int]) -> None:
    try:
        explain.why(view, request, settings)
    except TooBig as error:
        raise TooBig(error.message, hint=f"its sizes: {', '.join(map(format_mib, there))}") from error


def _plain(spec: Spec) -> dict[str, Any]:
    wanted: Wanted = spec.wanted
    return {
        "name": spec.name,
        "display_name": spec.title,
        "path": spec.folder,
        "from": spec.base,
        "memory_mib": wanted.memory_mib or None,
        "profile": wanted.profile or None,
        "cull_after": wanted.cull_after_s or None,
    }
