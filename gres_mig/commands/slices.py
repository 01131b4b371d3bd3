"""`gres-mig slices`: sets up and tests what holds slices to their memory."""

from __future__ import annotations

import os
import shutil
import subprocess

import click

import gres_mig
from gres_mig import machine
from gres_mig.allocator import Allocator
from gres_mig.answers import emit, for_root
from gres_mig.cli import Node, json_option, pass_node
from gres_mig.deadline import operate
from gres_mig.errors import BadRequest, GresMigError, NodeFault
from gres_mig.files import make_folder
from gres_mig.models import Owner, Request
from gres_mig.sizes import format_mib

_TESTED_MIB = 1024


@click.group(no_args_is_help=False)
def slices() -> None:
    """Set up and test GPUs that are shared by software limits."""


@slices.command()
@click.argument("file", type=click.Path())
@json_option
def build(file: str, as_json: bool) -> None:
    """Compile what keeps libvgpu.so from changing a process's umask; needs a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise NodeFault("there is no C compiler: no cc in PATH", hint="install one, such as gcc", code="SLICE")
    path = os.path.abspath(file)
    source = os.path.join(os.path.dirname(gres_mig.__file__), "keep_umask.c")
    temporary = f"{path}.{os.getpid()}"
    try:
        make_folder(os.path.dirname(path))
        # Beside it and then in its place: the one that is there may be in use.
        done = subprocess.run(
            [compiler, "-O2", "-Wall", "-shared", "-fPIC", "-o", temporary, source, "-ldl"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise NodeFault(f"{compiler}: {done.stderr.strip().splitlines()[-1]}", code="SLICE")
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
    except OSError as error:
        raise BadRequest(f"writing {path}: {error.strerror}") from error
    emit({"file": path}, f'made {path}; write in the configuration: keep_umask = "{path}"', as_json=as_json)


@slices.command()
@click.option("--uid", type=click.IntRange(0), default=0, help="As this user; by default as root.")
@json_option
@pass_node
def test(node: Node, uid: int, as_json: bool) -> None:
    """Take a small slice of each shared GPU, see that its limit is in force, and give it back."""
    settings = for_root(node.settings, "slices test")
    shared = [gpu for gpu in operate(settings, lambda allocator: allocator.look()) if gpu.sliced]
    if not shared:
        raise BadRequest("no GPU of this node is shared by slices", hint="name some as slices in the configuration")
    owner, found = Owner(f"manual:test-{os.getpid()}", uid), []
    lives = (machine.this_process(),)
    for gpu in shared:
        request = Request(_TESTED_MIB, gpus=(gpu.uuid,))

        def tried(allocator: Allocator, request: Request = request) -> str:
            try:
                return allocator.allocate(owner, request, witnesses=lives).allocation.isolation
            finally:
                allocator.reclaim(owner)

        try:
            found.append({"gpu_uuid": gpu.uuid, "isolation": operate(settings, tried), "error": None})
        except GresMigError as error:
            found.append({"gpu_uuid": gpu.uuid, "isolation": None, "error": str(error)})
    lines = [
        f"{each['gpu_uuid']}: " + (each["error"] or f"{format_mib(_TESTED_MIB)} are held to, {each['isolation']}")
        for each in found
    ]
    emit({"tested": found}, "\n".join(lines), as_json=as_json)
    if any(each["error"] for each in found):
        raise NodeFault("a shared GPU gives no slice that holds", hint="see docs/slices.md", code="SLICE")
