"""`gres-mig kernelspec`: what it puts into Jupyter's launcher, and what it leaves alone."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Answer, here
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.provisioning import KernelProvisionerFactory
from notebook_server import gpu_spec

from gres_mig.simulator import Node
from gres_mig_jupyter import kernelspec
from gres_mig_jupyter.kernelspec import Wanted


@pytest.fixture(autouse=True)
def jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own kernels, and no others but this environment's."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("JUPYTER_PATH", raising=False)
    return tmp_path / "data" / "kernels"


@pytest.fixture
def run(node: Node, settings: object) -> Any:
    """`gres-mig kernelspec` on a node with two RTX PRO 6000."""
    (Path(node.store.folder) / "config.toml").write_text('gpus = "*"\n')
    return lambda *words: here("--node", node.store.folder, "kernelspec", *words)


def spec(folder: Path, name: str) -> dict[str, Any]:
    """What is written there."""
    content: dict[str, Any] = json.loads((folder / name / "kernel.json").read_text())
    return content


def ours(answer: Answer) -> list[str]:
    """The names it lists."""
    return [each["name"] for each in answer.plain["kernelspecs"]]


def test_a_kernel_of_a_size_is_the_one_it_is_made_from_with_gpu_memory(run: Any, jupyter: Path) -> None:
    answer = run("install", "--user", "--memory", "8G")

    made, origin = spec(jupyter, "python3-gpu-8g"), KernelSpecManager().get_kernel_spec("python3")
    assert answer.out == f"Python 3 · GPU 8 GiB: {jupyter / 'python3-gpu-8g'}\n"
    assert made["display_name"] == "Python 3 · GPU 8 GiB"
    assert made["metadata"]["kernel_provisioner"] == {"provisioner_name": "gres-mig", "config": {"memory": "8192"}}
    assert (made["argv"], made["language"]) == (origin.argv, origin.language)
    assert {path.name for path in (jupyter / "python3-gpu-8g").iterdir()} >= {"kernel.json", "logo-64x64.png"}
    assert stat.S_IMODE((jupyter / "python3-gpu-8g").stat().st_mode) == 0o755


def test_jupyter_finds_it_and_starts_it_with_our_provisioner(run: Any) -> None:
    run("install", "--user", "--memory", "8000")

    found = KernelSpecManager().get_kernel_spec("python3-gpu-8000m")
    assert found.display_name == "Python 3 · GPU 7.8 GiB"
    assert KernelProvisionerFactory().is_provisioner_available(found)


@pytest.mark.parametrize(
    ("wanted", "suffix", "title"),
    [
        (Wanted(8192), "gpu-8g", "GPU 8 GiB"),
        (Wanted(8000), "gpu-8000m", "GPU 7.8 GiB"),
        (Wanted(24192), "gpu-24192m", "GPU 23.6 GiB"),
        (Wanted(97280), "gpu-95g", "GPU 95 GiB"),
        (Wanted(1), "gpu-1m", "GPU 1 MiB"),
        (Wanted(0, "1g.24gb+me.all"), "gpu-1g.24gb.me.all", "GPU 1g.24gb+me.all"),
    ],
)
def test_its_name_is_one_that_jupyter_takes_and_its_title_never_says_too_much(
    wanted: Wanted, suffix: str, title: str
) -> None:
    assert (wanted.suffix, wanted.title) == (suffix, title)
    assert re.fullmatch(r"[a-z0-9._-]+", wanted.suffix)


def test_all_profiles_is_a_kernel_for_each_size_of_the_node(run: Any) -> None:
    answer = run("install", "--user", "--all-profiles", "--json")

    assert ours(answer) == ["python3-gpu-24192m", "python3-gpu-48512m", "python3-gpu-95g"]


def test_what_is_there_already_is_not_written_again(run: Any, jupyter: Path) -> None:
    words = ("install", "--user", "--memory", "8G", "--profile", "1g.24gb+me", "--json")
    run(*words)
    before = {path: path.stat().st_mtime_ns for path in jupyter.rglob("*")}

    answer = run(*words)

    assert {each["state"] for each in answer.plain["kernelspecs"]} == {"unchanged"}
    assert {path: path.stat().st_mtime_ns for path in jupyter.rglob("*")} == before


def test_a_kernel_may_be_culled_sooner_and_another_time_not(run: Any, jupyter: Path) -> None:
    run("install", "--user", "--memory", "8G", "--cull-after", "600")
    culled = spec(jupyter, "python3-gpu-8g")["metadata"]["cull_idle_timeout"]
    answer = run("install", "--user", "--memory", "8G", "--json")

    assert culled == 600
    assert answer.plain["kernelspecs"][0]["state"] == "changed"
    assert "cull_idle_timeout" not in spec(jupyter, "python3-gpu-8g")["metadata"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--memory", "900G"],
            "no instance on this node holds 921,600 MiB: the largest is 4g.96gb (97,280 MiB); its sizes: 24,192 MiB, ",
        ),
        (["--profile", "9g.999gb"], "no profile 9g.999gb can be had on this node; there are: 1g.24gb, "),
        (["--memory", "8Q"], "memory size '8Q': Q is not a unit"),
        ([], "no size was named; such as: --memory 8G, or --all-profiles"),
        (["--memory", "8G", "--from", "nothing"], "there is no kernel spec 'nothing' to make one from; there are: "),
        (["--memory", "8G", "--sys-prefix"], "--user, --sys-prefix and --prefix are different places"),
        (["--memory", "8G", "--cull-after", "0"], "Invalid value for '--cull-after'"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_had_is_refused_and_nothing_is_written(
    run: Any, jupyter: Path, words: list[str], says: str
) -> None:
    answer = run("install", "--user", "--memory", "8000", *words) if words else run("install", "--user")

    assert answer.code == 2
    assert answer.err.startswith(f"gres-mig: {says}")
    assert not jupyter.exists()


def test_a_kernel_with_gpu_memory_is_no_origin_for_another(run: Any) -> None:
    run("install", "--user", "--memory", "8G")

    answer = run("install", "--user", "--memory", "16G", "--from", "python3-gpu-8g")

    assert answer.code == 2
    assert answer.err == (
        "gres-mig: python3-gpu-8g asks for GPU memory itself; make one from another: --from python3\n"
    )


def test_a_kernel_that_runs_elsewhere_is_no_origin(run: Any, jupyter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = {**gpu_spec(), "metadata": {"kernel_provisioner": {"provisioner_name": "remote"}}}
    (jupyter / "far").mkdir(parents=True)
    (jupyter / "far" / "kernel.json").write_text(json.dumps(remote))
    monkeypatch.setattr(KernelProvisionerFactory, "is_provisioner_available", lambda *_: True)

    answer = run("install", "--user", "--memory", "8G", "--from", "far")

    assert answer.err == (
        "gres-mig: far is started by the provisioner remote, and gres-mig starts local kernels only\n"
    )


def test_it_goes_where_it_is_told(run: Any, tmp_path: Path) -> None:
    run("install", "--prefix", str(tmp_path / "there"), "--memory", "8G")

    assert (tmp_path / "there/share/jupyter/kernels/python3-gpu-8g/kernel.json").exists()


def test_without_a_place_it_is_everybodys_for_root_and_ones_own_for_others(jupyter: Path) -> None:
    place = kernelspec.place(user=False, prefix="")

    assert place == ("/usr/local/share/jupyter/kernels" if os.geteuid() == 0 else str(jupyter))
    assert kernelspec.place(user=False, prefix=sys.prefix) == f"{sys.prefix}/share/jupyter/kernels"


def test_only_kernels_that_it_made_are_listed_replaced_and_removed(run: Any, jupyter: Path) -> None:
    theirs = jupyter / "python3-gpu-16g"
    theirs.mkdir(parents=True)
    (theirs / "kernel.json").write_text(json.dumps(gpu_spec("16G")))
    run("install", "--user", "--memory", "8G")

    replaced = run("install", "--user", "--memory", "16G")
    listed = run("list", "--json")
    removed = run("remove", "--all", "--user", "--json")
    named = run("remove", "python3-gpu-16g", "--user")

    assert replaced.code == 2
    assert replaced.err == (
        f"gres-mig: {theirs} was not made by gres-mig and is left alone; "
        "run: jupyter kernelspec remove python3-gpu-16g\n"
    )
    assert ours(listed) == ours(removed) == ["python3-gpu-8g"]
    assert named.out == "none there\n"
    assert [path.name for path in jupyter.iterdir()] == ["python3-gpu-16g"]


def test_the_list_says_what_each_is(run: Any, jupyter: Path) -> None:
    run("install", "--user", "--memory", "8G", "--cull-after", "600")

    assert run("list").out == f"python3-gpu-8g  Python 3 · GPU 8 GiB  {jupyter / 'python3-gpu-8g'}\n"
    assert run("list", "--json").plain["kernelspecs"] == [
        {
            "name": "python3-gpu-8g",
            "display_name": "Python 3 · GPU 8 GiB",
            "path": str(jupyter / "python3-gpu-8g"),
            "from": "python3",
            "memory_mib": 8192,
            "profile": None,
            "cull_after": 600,
        }
    ]


def test_to_remove_something_it_has_to_be_said_what(run: Any) -> None:
    answers = [run("remove"), run("remove", "--all", "python3-gpu-8g")]

    assert {answer.code for answer in answers} == {2}
    assert {answer.err for answer in answers} == {
        "gres-mig: name kernels to remove, or --all; see: gres-mig kernelspec list\n"
    }


def test_a_node_without_managed_gpus_offers_nothing(run: Any, node: Node) -> None:
    (Path(node.store.folder) / "config.toml").write_text("")

    answer = run("install", "--user", "--all-profiles")

    assert answer.code == 4
    assert answer.err == ("gres-mig: this node has no sizes to offer: no GPU of it is managed; see: gres-mig doctor\n")
