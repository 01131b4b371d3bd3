"""What JupyterHub's form and API accept for GPU memory: digits within the sizes, and nothing else gets anywhere."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from notebook_hub import Form

pytest.importorskip("batchspawner")
from jupyterhub.apihandlers import default_handlers
from traitlets import TraitError
from traitlets.config import Config

from gres_mig_jupyter.hub_choice import Refused
from gres_mig_jupyter.hub_slurm import MigSlurmSpawner, PortOnly

SIZES = """format 1
exclusive refuse
type a
board 2 97887 NVIDIA <RTX> & PRO
profile 1g.24gb 24192 24320 size
profile 1g.24gb+gfx 24192 24320 name
profile 2g.48gb 48512 48640 size
type b
board 1 81559 NVIDIA H100
profile 1g.10gb 9856 11652 size
profile 1g<b>.24gb 24192 24320 size
"""


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster's sizes file."""
    file = tmp_path_factory.mktemp("slurm") / "gres-mig-sizes.conf"
    file.write_text(SIZES)
    return file


def spawner(sizes: Path, **more: Any) -> MigSlurmSpawner:
    """One that submits nothing here; `more` is what the site configured."""
    return MigSlurmSpawner(config=Config({"MigSlurmSpawner": {"gpu_sizes_file": str(sizes), **more}}))


def apply(spawner: MigSlurmSpawner, options: object) -> MigSlurmSpawner:
    """What JupyterHub does with user_options before a start."""
    asyncio.run(spawner._run_apply_user_options(options))
    return spawner


@pytest.mark.parametrize(
    "options",
    [{"gpu_memory": 8000}, {"gpu_memory": "8000"}, {"gpu_memory": "0008000"}],
    ids=["number", "text", "zeros"],
)
def test_a_number_of_mib_is_asked_of_slurm(sizes: Path, options: object) -> None:
    chosen = apply(spawner(sizes), options)

    assert chosen.req_migmem == "8000"


@pytest.mark.parametrize("options", [{}, {"gpu_memory": ""}, {"gpu_memory": None}, {"gpu_memory": 0}])
def test_without_a_choice_nothing_is_asked(sizes: Path, options: object) -> None:
    chosen = apply(apply(spawner(sizes), {"gpu_memory": 8000}), options)

    assert chosen.req_migmem == ""


HOSTILE = [
    "8000\n#SBATCH --qos=vip",
    "8000\n",
    "8000;id",
    "$(id)",
    "8000 ",
    " 8000",
    "+8000",
    "-1",
    "8e3",
    "8G",
    "8_000",
    "8000.0",
    "٨٠٠٠",
    "８０００",
    "80000000",
    "9" * 5000,
    "{{ 8 }}",
    8000.0,
    -1,
    True,
    ["8000"],
    {"8000": 1},
]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_anything_but_digits_is_refused_with_what_would_be_right(sizes: Path, value: object) -> None:
    with pytest.raises(Refused) as refused:
        apply(spawner(sizes), {"gpu_memory": value})

    assert refused.value.status_code == 400
    assert "it is not a number of MiB; write up to seven digits, such as 8000" in refused.value.message
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 200


@given(value=st.text())
def test_no_other_text_gets_by(sizes: Path, value: str) -> None:
    chosen = spawner(sizes)
    try:
        apply(chosen, {"gpu_memory": value})
    except Refused:
        assert not value.isascii() or not value.isdigit() or int(value) > 48512
    assert chosen.req_migmem in ("", str(int(value)) if value.isascii() and value.isdigit() else "")


@pytest.mark.parametrize(
    "name", ["migmem", "req_migmem", "prologue", "gres", "cmd", "gpu_share", "GPU_MEMORY", "__class__"]
)
def test_any_other_option_is_refused(sizes: Path, name: str) -> None:
    with pytest.raises(Refused) as refused:
        apply(spawner(sizes), {name: "touch /tmp/x", "gpu_memory": "8000"})

    assert refused.value.status_code == 400
    assert refused.value.message == f"option '{name}': there is no such option; use gpu_memory"


def test_more_than_any_instance_holds_is_refused_with_the_sizes(sizes: Path) -> None:
    with pytest.raises(Refused) as refused:
        apply(spawner(sizes), {"gpu_memory": 48513})

    assert refused.value.message == (
        "gpu_memory 48513: no instance holds that here; choose one of these, in MiB: 9856, 24192, 48512"
    )


def test_where_the_sizes_are_not_known_only_a_server_without_gpu_memory_starts(tmp_path: Path) -> None:
    blind = spawner(tmp_path / "none")
    without = apply(blind, {})
    form = asyncio.run(blind.get_options_form())

    with pytest.raises(Refused, match="No such file"):
        apply(blind, {"gpu_memory": 8000})
    assert without.req_migmem == ""
    assert "No GPU memory can be chosen now: reading" in form


def test_the_form_is_labelled_and_what_is_in_it_is_escaped(sizes: Path) -> None:
    form = Form(asyncio.run(spawner(sizes).get_options_form()))

    assert form.labels == {"gpu_memory": "GPU memory"}
    assert form.explanation("gpu_memory").startswith("What each notebook is given")
    assert form.options["gpu_memory"] == {
        "": "none",
        "9856": "9,856 MiB (1g.10gb)",
        "24192": "24,192 MiB (1g.24gb, 1g<b>.24gb)",
        "48512": "48,512 MiB (2g.48gb)",
    }
    assert form.chosen == {"gpu_memory": ""}
    assert "<b>" not in form.text


def test_the_site_says_which_sizes_are_offered_and_which_is_chosen(sizes: Path) -> None:
    narrowed = spawner(sizes, gpu_memory_choices=[20000, 8000, 99999], gpu_memory_default=8000)
    form = Form(asyncio.run(narrowed.get_options_form()))
    chosen = apply(narrowed, {})

    assert list(form.options["gpu_memory"]) == ["", "8000", "20000"]
    assert form.chosen == {"gpu_memory": "8000"}
    assert chosen.req_migmem == "8000"
    for other in (12000, 24192):
        with pytest.raises(Refused, match=r"choose one of these, in MiB: 8000, 20000"):
            apply(narrowed, {"gpu_memory": other})


def test_the_sites_own_fields_go_to_its_own_function_and_ours_do_not(sizes: Path) -> None:
    got: list[object] = []
    own = spawner(
        sizes,
        options_form="<input name=queue>",
        options_from_form="simple",
        apply_user_options=lambda spawner, options: got.append(options),
    )
    form = asyncio.run(own.get_options_form())
    options = own.run_options_from_form({"gpu_memory": ["8000"], "queue": ["short"], "_xsrf": ["x"]})
    by_query = own.options_from_query({"gpu_memory": ["8000"], "queue": ["short"]})
    apply(own, options)

    assert form.endswith("<input name=queue>")
    assert options == by_query == {"gpu_memory": "8000", "queue": "short"}
    assert got == [{"queue": "short"}]
    assert own.req_migmem == "8000"
    with pytest.raises(TraitError, match="has to be a function"):
        spawner(sizes, apply_user_options={"queue": "req_partition"})


def test_the_documented_fields_of_a_sites_own_work(sizes: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "jupyterhub.md").read_text()
    config = Config({"MigSlurmSpawner": {"gpu_sizes_file": str(sizes)}})
    exec(re.findall(r"```python\n(def apply_user_options.*?)```", text, re.DOTALL)[0], {"c": config})
    own = MigSlurmSpawner(config=config)
    form = Form(asyncio.run(own.get_options_form()))
    apply(own, own.run_options_from_form({"queue": ["long"], "gpu_memory": ["8000"]}))

    assert list(form.options) == ["gpu_memory", "queue"]
    assert (own.req_partition, own.req_migmem) == ("long", "8000")


def test_the_job_asks_for_migmem_beside_what_the_site_asks_for(sizes: Path) -> None:
    asking = apply(spawner(sizes, req_gres="shard:2"), {"gpu_memory": 8000})
    asking.user_options = {"prologue": "touch x", "gpu_memory": 8000}
    for name in ("username", "homedir", "keepvars"):
        setattr(asking, f"req_{name}", name)
    script = asyncio.run(asking._get_batch_script(**asking.user_options, cmd="touch x"))
    asking.batch_script = "#!/bin/sh\n{{cmd}}"

    assert "#SBATCH --gres=shard:2,migmem:8000\n" in script
    assert "touch" not in script
    with pytest.raises(Refused, match="does not ask Slurm for GPU memory"):
        asyncio.run(asking._get_batch_script())


def test_the_choice_outlives_the_hub_and_the_clearing_of_the_state(sizes: Path) -> None:
    before = apply(spawner(sizes), {"gpu_memory": 8000})
    before.job_id = "7"
    state = before.get_state()
    after = spawner(sizes)
    after.load_state(state)
    after.clear_state()

    assert after.req_migmem == "8000"
    assert after.get_state() == {"gpu_memory": 8000}


def test_what_asks_slurm_cannot_be_set_to_anything_else(sizes: Path) -> None:
    with pytest.raises(TraitError, match="seven digits"):
        spawner(sizes).req_migmem = "8000\n#SBATCH --qos=vip"


def test_no_handler_sets_other_attributes_of_a_spawner() -> None:
    handlers = [handler for path, handler, *_ in default_handlers if path == r"/api/batchspawner"]

    assert handlers == [PortOnly]
