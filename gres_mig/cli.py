"""The command `gres-mig`: finds the command's module, and turns every error into one line and an exit code."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from gres_mig import __version__, answers, config
from gres_mig.errors import BadRequest, GresMigError
from gres_mig.models import Settings
from gres_mig.values import Value

_COMMANDS = {
    "allocate": "instance",
    "reclaim": "instance",
    "adopt": "instance",
    "env": "instance",
    "reconcile": "instance",
    "status": "status",
    "why": "why",
    "profiles": "profiles",
    "doctor": "doctor",
    "setup": "setup",
    "enable-mig": "mode",
    "disable-mig": "mode",
    "unfence": "mode",
    "boot": "mode",
    "serve": "serve",
    "reload": "reload",
    "slurm": "slurm",
    "slices": "slices",
    "police": "police",
    "kernelspec": "kernelspec",
    "simulate": "simulate",
    "demo": "demo",
}


class Node(Value):
    """Which node the command line means."""

    folder: str | None
    config_file: str | None
    name: str = ""
    """Which `[node.NAME]` section, where the configuration has some."""

    @property
    def settings(self) -> Settings:
        """The node's configuration, read now."""
        return config.load(self.config_file, node=self.folder, name=self.name)


class _Group(click.Group):
    """Imports a command's module when the command is named: a hook pays for one, not for all."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = importlib.import_module(f"gres_mig.commands.{_COMMANDS[name]}")
        command = getattr(module, name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from gres_mig.nvml import Session

    folder = ctx.params.get("node")
    settings = Node(folder, ctx.params.get("config_file"), ctx.params.get("name") or "").settings
    try:
        with Session(settings.simulator) as driver:
            driver_version, nvml_version = driver.versions()
        where = " (simulated)" if settings.simulator else ""
        click.echo(f"gres-mig {__version__}, driver {driver_version}, NVML {nvml_version}{where}")
    except GresMigError as error:
        click.echo(f"gres-mig {__version__}, no driver: {error.message}")
    ctx.exit()


@click.group(cls=_Group, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--node", metavar="DIR", is_eager=True, help="Use the simulated node in this folder.")
@click.option("--config", "config_file", metavar="FILE", is_eager=True, help="Use this configuration.")
@click.option("--name", metavar="NAME", default="", is_eager=True, help="Use this [node.NAME] section of it.")
@click.option("--version", is_flag=True, expose_value=False, callback=_version, help="Show versions and exit.")
@click.option("-v", "--verbose", is_flag=True, help="Say on stderr what was changed.")
@click.pass_context
def gres_mig(ctx: click.Context, node: str | None, config_file: str | None, name: str, verbose: bool) -> None:
    """GPU memory on demand: the smallest MIG instance that holds a request, made for it and destroyed after it."""
    ctx.obj = Node(node, config_file, name)
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="gres-mig: %(message)s")


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
pass_node = click.make_pass_decorator(Node)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; exit code 0 done, 2 request, 3 capacity, 4 node."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = gres_mig.main(given, prog_name="gres-mig", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.UsageError as error:
        hint = f"see: {error.ctx.command_path} --help" if error.ctx else ""
        answers.fail(BadRequest(error.format_message().rstrip("."), hint=hint), as_json="--json" in given)
    except GresMigError as error:
        answers.fail(error, as_json="--json" in given)
