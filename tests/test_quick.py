"""The quick way and click's are one command line: what both understand has one answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gres_mig import __main__, cli, quick, simulator
from gres_mig.config_text import write_node_config

LINES = {
    "a size": "allocate --owner manual:a --memory 8000",
    "JSON": "allocate --owner manual:a --memory 8000 --json",
    "JSON first": "allocate --json --owner manual:a --memory 8G",
    "joined by =": "allocate --owner=manual:a --memory=8G --json",
    "a profile": "allocate --owner manual:a --profile 2g.48gb --json",
    "a profile in capitals": "allocate --owner manual:a --profile 2G.48GB",
    "a named GPU": "allocate --owner manual:a --memory 8000 --gpu {gpu} --json",
    "two named GPUs": "allocate --owner manual:a --memory 8000 --gpu {gpu} --gpu {gpu} --json",
    "the last of two sizes": "allocate --owner manual:a --memory 8000 --memory 40000 --json",
    "witnesses": "allocate --owner manual:a --memory 8000 --witness 1 --witness=1 --json",
    "a witness that is no process": "allocate --owner manual:a --memory 8000 --witness 0",
    "a witness that is no number": "allocate --owner manual:a --memory 8000 --witness me --json",
    "reclaim": "reclaim manual:nobody",
    "reclaim as JSON": "reclaim --json manual:nobody",
    "no owner": "allocate --memory 8000",
    "no size": "allocate --owner manual:a",
    "a size and a profile": "allocate --owner manual:a --memory 8000 --profile 1g.24gb",
    "no size at all": "allocate --owner manual:a --memory 0 --json",
    "a bad owner": "allocate --owner a --memory 8000",
    "more than a board holds": "allocate --owner manual:a --memory 999999 --json",
    "a GPU that is not there": "allocate --owner manual:a --memory 8000 --gpu GPU-0 --json",
    "a bad owner to reclaim": "reclaim a --json",
}
"""Every one is understood by the quick way."""

FOR_CLICK = {
    "help": "allocate --help",
    "an unknown option": "allocate --owner manual:a --memory 8000 --fast",
    "an option without its value": "allocate --owner manual:a --memory",
    "a shortened option": "allocate --own manual:a --memory 8000",
    "a word too many": "allocate manual:a --memory 8000",
    "reclaim without an owner": "reclaim",
    "orphans": "reclaim --orphans",
    "two owners": "reclaim manual:a manual:b",
    "verbose": "-v allocate --owner manual:a --memory 8000",
    "an option of the other command": "reclaim --memory 8000",
    "a node after the command": "allocate --node x --owner manual:a",
    "end of options": "reclaim -- manual:a",
    "the command is a value": "--node allocate status",
}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    folder = tmp_path / "node"
    simulator.create(folder, [("rtx-pro-6000", 1)])
    write_node_config(folder)
    return folder


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_both_ways_give_one_answer(line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answers = []
    for main in (__main__.main, cli.main):
        folder = tmp_path / f"node-{len(answers)}" / "node"
        folder.parent.mkdir()
        simulator.create(folder, [("rtx-pro-6000", 1)], uuids=["GPU-11111111-2222-3333-4444-555555555555"])
        write_node_config(folder)
        words = line.format(gpu="GPU-11111111-2222-3333-4444-555555555555").split()

        with pytest.raises(SystemExit) as ended:
            main(["--node", str(folder), *words])

        out, err = capfd.readouterr()
        answers.append((ended.value.code, _without_boot(out), err.replace(str(folder), "NODE")))
    assert quick.parse(line.split()) is not None
    assert answers[0] == answers[1]


@pytest.mark.parametrize("line", FOR_CLICK.values(), ids=FOR_CLICK)
def test_what_is_not_plain_is_left_to_click(line: str) -> None:
    assert quick.parse(line.split()) is None


def test_the_quick_way_imports_neither_click_nor_pydantic(node: Path) -> None:
    program = (
        "import sys, atexit; atexit.register(lambda: print(sorted({'click', 'pydantic', 'tomllib', 'dataclasses', "
        "'inspect', 'typing', 'logging', 'subprocess'} & set(sys.modules)))); "
        "from gres_mig.__main__ import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "--node", str(node), "allocate", "--owner", "manual:a", "--memory", "1"]
    subprocess.run(command, check=True, capture_output=True)

    again = subprocess.run(command, check=True, capture_output=True, text=True)

    assert again.stdout.splitlines()[-1] == "[]"


OPTIONAL = {"exporter", "exporter_reload", "police", "slice_driver", "slice_hami", "slice_session", "slice_users",
            "slices", "nvml_memory"}  # fmt: skip
IN_ONE_PROCESS = """\
import sys
from gres_mig import config, machine
from gres_mig.allocator import Allocator
from gres_mig.models import Owner, Request
from gres_mig.state import Store
settings = config.load(node=sys.argv[1])
boot_id = machine.boot_id(settings.simulator)
allocator = Allocator(settings, Store(settings, boot_id), boot_id)
assert allocator.allocate(Owner("manual:a"), Request(1)).created
assert allocator.reclaim(Owner("manual:a"))[0].verdict == "released"
allocator.reconcile()
print(*(name.removeprefix("gres_mig.") for name in sys.modules))
"""


@pytest.mark.parametrize("slices", [False, True])
def test_what_the_configuration_does_not_name_is_not_imported(node: Path, slices: bool) -> None:
    if slices:
        (node / "config.toml").write_text('gpus = "*"\nslices = "*"\ndcgm_mapping = "run/jobs"\n')

    # In one process, for the work itself is done in a child, whose imports nobody would see.
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS, node], capture_output=True, text=True, check=True
    ).stdout.split()

    assert OPTIONAL & set(done) == ((OPTIONAL - {"slices"}) if slices else set())


def test_a_line_that_nobody_wants_to_read_costs_no_import_either() -> None:
    code = "import sys; from gres_mig import log; log.info('allocated'); print('logging' in sys.modules)"
    more = "; log.warning('stuck')"

    quiet, loud = (
        subprocess.run([sys.executable, "-c", code + end], capture_output=True, text=True, check=True)
        for end in ("", more)
    )

    assert (quiet.stdout, quiet.stderr) == ("False\n", "")
    assert loud.stderr == "stuck\n"


def _without_boot(out: str) -> str:
    if out.startswith("{"):
        plain = json.loads(out)
        plain.pop("boot_id", None)
        plain.pop("mig_uuid", None)
        return json.dumps(plain)
    return re.sub(r"MIG-[0-9a-f-]+", "MIG", out)
