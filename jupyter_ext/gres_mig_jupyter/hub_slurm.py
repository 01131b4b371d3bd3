"""JupyterHub's servers as Slurm jobs with `migmem`; the job has the instance, and its kernels share it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchspawner import SlurmSpawner
from batchspawner.api import BatchSpawnerAPIHandler
from jupyterhub.apihandlers import default_handlers
from tornado import web
from traitlets import TraitError, Unicode, default, observe, validate

from gres_mig import slices
from gres_mig.errors import ConfigError
from gres_mig_jupyter.hub_choice import GpuChoice, Refused, Size
from gres_mig_slurm import conf_lines, sizes_file


class MigSlurmSpawner(GpuChoice, SlurmSpawner):  # type: ignore[misc]  # batchspawner has no types
    """batchspawner's SlurmSpawner, with a form that shows the cluster's sizes."""

    gpu_sizes_file = Unicode(
        help="The file that `gres-mig slurm profiles --write` wrote; by default the one beside slurm.conf."
    ).tag(config=True)

    req_migmem = Unicode(help="MiB that the job asks of migmem; it follows `gpu_memory`.")

    async def gpu_sizes(self) -> Sequence[Size]:
        """What the submit script knows of the cluster; how much of it is free is the scheduler's to say."""
        path = self.gpu_sizes_file
        try:
            text = await asyncio.to_thread(Path(path).read_text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            hint = "run on a node of each type: gres-mig slurm profiles --write, and name the file: gpu_sizes_file"
            raise ConfigError(f"reading {path}: {error}", hint=hint) from error
        names: dict[int, dict[str, None]] = {}
        for board in (board for node in sizes_file.parse(text, path).types for board in node.boards):
            for profile in (p for p in board.profiles if p.by_size):
                names.setdefault(profile.memory_mib, {})[profile.name] = None
            if board.largest_slice_mib:
                for memory_mib in slices.sizes_mib(board.whole_mib, board.slice_overhead_mib):
                    names.setdefault(memory_mib, {})[slices.NAME] = None
        return [Size(memory_mib, tuple(profiles)) for memory_mib, profiles in sorted(names.items())]

    def get_req_subvars(self) -> dict[str, str]:
        """The template's variables: `gres` has migmem in it, beside what the site asks for with `req_gres`."""
        subvars: dict[str, str] = super().get_req_subvars()
        if self.req_migmem:
            subvars["gres"] = ",".join(filter(None, (subvars["gres"], f"migmem:{self.req_migmem}")))
        return subvars

    async def _get_batch_script(self, **_: object) -> str:
        # Without what was passed: batchspawner 1.3 lets user_options replace every variable of the template,
        # also those that hold shell commands, such as prologue.
        own = {**self.get_req_subvars(), "cmd": self.cmd_formatted_for_batch()}
        script = str(await super()._get_batch_script(**own))
        if self.req_migmem and f"migmem:{self.req_migmem}" not in script:
            hint = "put into it: {% if gres %}#SBATCH --gres={{gres}}{% endif %}"
            raise Refused(ConfigError("the site's batch_script does not ask Slurm for GPU memory", hint=hint))
        return script

    @default("gpu_sizes_file")
    def _beside_slurm_conf(self) -> str:
        return str(Path(conf_lines.find()).with_name(sizes_file.FILE_NAME))

    @observe("gpu_memory")
    def _ask(self, _: object) -> None:
        self.req_migmem = str(self.gpu_memory or "")

    @validate("req_migmem")
    def _only_digits(self, proposal: Any) -> str:
        if not re.fullmatch(r"([0-9]{1,7})?", proposal.value):
            raise TraitError("req_migmem: up to seven digits are accepted, MiB")
        return str(proposal.value)


class PortOnly(BatchSpawnerAPIHandler):  # type: ignore[misc]
    """What a job's server tells the Hub: its port, and nothing else.

    batchspawner 1.3 sets whatever attribute of the spawner a holder of the server's token names, and that is its
    user: batch_script, or batch_query_cmd and exec_prefix, which the Hub runs in a shell as itself.
    """

    @web.authenticated
    def post(self) -> None:
        """Set the port of the spawner whose token this is."""
        data = self.get_json_body()
        port = data.get("port") if isinstance(data, dict) and len(data) == 1 else None
        if type(port) is not int or not 0 < port < 65536:
            raise web.HTTPError(400, 'found something else than {"port": a number from 1 to 65535}')
        super().post()


def _replace_handler() -> None:
    for number, (path, handler, *rest) in enumerate(default_handlers):
        if handler is BatchSpawnerAPIHandler:
            default_handlers[number] = (path, PortOnly, *rest)


_replace_handler()
