"""Commands that give an instance to an owner and take it back."""

from __future__ import annotations

import shlex

import click

from gres_mig import quick
from gres_mig.answers import describe, emit, emit_outcomes, environment, for_root, plain_allocation
from gres_mig.cli import Node, json_option, pass_node
from gres_mig.deadline import operate
from gres_mig.errors import BadRequest
from gres_mig.machine import boot_id
from gres_mig.models import Allocation
from gres_mig.owners import parse_owner
from gres_mig.state import Store


@click.command()
@click.option("--owner", metavar="OWNER", help="Who it is for: manual:NAME, slurm:CLUSTER:JOBID, jupyter:UID:KERNEL.")
@click.option("--memory", metavar="SIZE", help="MiB, or with K, M, G: 8000, 8G.")
@click.option("--profile", metavar="NAME", help="A profile by name instead of a size: 1g.24gb+me.")
@click.option("--gpu", "gpus", multiple=True, metavar="UUID", help="On this GPU; may be given again.")
@click.option("--witness", "witnesses", multiple=True, metavar="PID", help="A process that lives as long as OWNER.")
@click.option("--isolation", metavar="mig", help="A MIG instance and no slice, whose limit is software.")
@json_option
@pass_node
def allocate(
    node: Node,
    owner: str | None,
    memory: str | None,
    profile: str | None,
    gpus: tuple[str, ...],
    witnesses: tuple[str, ...],
    isolation: str | None,
    as_json: bool,
) -> None:
    """Give OWNER the smallest instance that holds SIZE; asking again gives the same one."""
    quick.allocate(lambda: node.settings, owner, memory, profile, gpus, witnesses, isolation, as_json=as_json)


@click.command()
@click.argument("owner", required=False)
@click.option("--orphans", is_flag=True, help="Everything whose owner is gone, and what is stuck, now.")
@click.option("--foreign", metavar="GPU:GI", help="An instance that no record names; needs --yes.")
@click.option("--yes", is_flag=True, help="Yes, destroy what is not recorded as ours.")
@json_option
@pass_node
def reclaim(node: Node, owner: str | None, orphans: bool, foreign: str | None, yes: bool, as_json: bool) -> None:
    """Take back what OWNER has; nothing there is success."""
    if [owner is not None, orphans, foreign is not None].count(True) != 1:
        raise BadRequest("name an owner, --orphans or --foreign GPU:GI, one of them", hint="see: gres-mig status")
    if foreign is not None:
        gpu_uuid, gi_id = parse_instance(foreign)
        if not yes:
            raise BadRequest(f"destroying {foreign}, which no record names, needs --yes", hint="see: gres-mig status")
        settings = for_root(node.settings, "reclaim", or_delegate=True)
        gone = operate(settings, lambda allocator: allocator.reclaim_foreign(gpu_uuid, gi_id))
        plain = {"gpu_uuid": gpu_uuid, "gi_id": gone.id}
        return emit({"reclaimed": [plain]}, f"destroyed GPU instance {gi_id} of {gpu_uuid}", as_json=as_json)
    if owner is None:
        settings = for_root(node.settings, "reclaim", or_delegate=True)
        outcomes = operate(settings, lambda allocator: allocator.reconcile(now=True))
        return emit_outcomes(outcomes, "no orphans", as_json=as_json)
    return quick.reclaim(lambda: node.settings, owner, as_json=as_json)


@click.command()
@json_option
@pass_node
def reconcile(node: Node, as_json: bool) -> None:
    """Settle what crashes, ended owners and busy hardware left; the service does this by itself."""
    settings = for_root(node.settings, "reconcile", or_delegate=True)
    outcomes = operate(settings, lambda allocator: allocator.reconcile())
    emit_outcomes(outcomes, "nothing to settle", as_json=as_json)


@click.command()
@click.argument("owner")
@click.argument("instance", metavar="GPU:GI")
@json_option
@pass_node
def adopt(node: Node, owner: str, instance: str, as_json: bool) -> None:
    """Record an existing instance as OWNER's; creates nothing."""
    who = parse_owner(owner)
    gpu_uuid, gi_id = parse_instance(instance)
    settings = for_root(node.settings, "adopt", or_delegate=True)
    allocation = operate(settings, lambda allocator: allocator.adopt(who, gpu_uuid, gi_id))
    emit(plain_allocation(allocation, created=False), f"adopted: {describe(allocation)}", as_json=as_json)


@click.command()
@click.argument("owner")
@json_option
@pass_node
def env(node: Node, owner: str, as_json: bool) -> None:
    """Print OWNER's environment as lines for a shell."""
    who = parse_owner(owner)
    settings = for_root(node.settings, "env", or_delegate=True)
    state = Store(settings, boot_id(settings.simulator)).read()
    found = next((r for r in state.of(who) if isinstance(r, Allocation)), None)
    if found is None:
        raise BadRequest(f"{owner} holds nothing on this node", hint="see: gres-mig status")
    variables = environment(found)
    # What the shell's user preloads himself stays, behind what holds a slice to its memory.
    kept = {"LD_PRELOAD": "${LD_PRELOAD:+:$LD_PRELOAD}"}
    text = "\n".join(f"export {name}={shlex.quote(value)}{kept.get(name, '')}" for name, value in variables.items())
    emit({"owner": owner, "environment": variables}, text, as_json=as_json)


def parse_instance(text: str) -> tuple[str, int]:
    """GPU UUID and GPU instance id of `GPU-…:3`."""
    gpu_uuid, _, number = text.rpartition(":")
    if not gpu_uuid.startswith("GPU-") or not (number.isascii() and number.isdigit()) or len(number) > 2:
        raise BadRequest(f"{text!r} is not GPU:GI, a GPU's UUID and an instance's id", hint="see: gres-mig status")
    return gpu_uuid, int(number)
