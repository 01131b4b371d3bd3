"""The site's own programs after our hooks: none that others than root can change is run as root, and all are found."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, brought_up, require_slurm

from gres_mig_slurm import check_chain, conf_lines, setup
from gres_mig_slurm.running import Cluster as Running

require_slurm()


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One node with one GPU."""
    with brought_up(request, {"n1": [("rtx-pro-6000", 1)]}) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def clean(cluster: Cluster) -> Iterator[None]:
    """After each test nothing is left of it."""
    yield
    cluster.cancel_all()
    cluster.assert_healthy()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site's program, root's alone, which says that it ran."""
    folder = tmp_path / "site"
    folder.mkdir(mode=0o755)
    program = folder / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    return program


def spoil(site: Path, how: str) -> Path:
    """Let others change what runs; the path that names it then."""
    if how == "file":
        site.chmod(0o775)
    elif how == "owner":
        os.chown(site, 1, -1)
    elif how == "folder":
        site.parent.chmod(0o777)
    elif how == "behind a link":
        link = site.parent.with_name("link")
        link.symlink_to(site)
        site.parent.chmod(0o757)
        return link
    elif how == "between two links":
        between = site.parent.with_name("between")
        between.mkdir()
        (between / "second").symlink_to(site)
        between.chmod(0o757)
        link = site.parent.with_name("link")
        link.symlink_to("between/second")
        return link
    return site


WAYS = ["file", "owner", "folder", "behind a link", "between two links"]


@pytest.mark.parametrize("how", WAYS)
def test_a_prolog_that_others_can_change_is_not_run_and_its_node_says_so(
    cluster: Cluster, site: Path, tmp_path: Path, how: str
) -> None:
    program = spoil(site, how)
    with cluster.hook_settings(f"PROLOG_CHAIN={program}"):
        job = cluster.sbatch("--gres=migmem:8000", script="echo begun")
        reason = cluster.wait_drained("n1")
        cluster.scancel(job)
        cluster.wait_free()
    cluster.resume("n1")

    assert reason.startswith("gres-mig: PROLOG_CHAIN is not run as root: others than root can change ")
    assert re.search(r" on the way to /\S+ \(owner \w+, mode [-drwx]{10}\); run: gres-mig slurm check$", reason)
    assert not (tmp_path / "ran").exists()
    assert cluster.output(job) == ""


def test_an_epilog_that_others_can_change_is_not_run_and_the_instance_is_given_back(
    cluster: Cluster, site: Path, tmp_path: Path
) -> None:
    with cluster.hook_settings(f"EPILOG_CHAIN={spoil(site, 'file')}"):
        job = cluster.sbatch("--gres=migmem:8000", script="echo begun")
        reason = cluster.wait_drained("n1")
    cluster.resume("n1")

    assert reason.startswith("gres-mig: EPILOG_CHAIN is not run as root: others than root can change ")
    assert not (tmp_path / "ran").exists()
    assert cluster.instances("n1") == []
    assert cluster.state(job) == "COMPLETED"


def test_what_only_root_can_change_is_run_behind_links_too(cluster: Cluster, site: Path, tmp_path: Path) -> None:
    link = tmp_path / "a link"
    link.symlink_to(site)
    with cluster.hook_settings(f"PROLOG_CHAIN='{link}'\nEPILOG_CHAIN={site}"):
        job = cluster.sbatch(script="echo begun")
        cluster.wait(job, "COMPLETED")

    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("key", ["PROLOG_CHAIN", "EPILOG_CHAIN", "TASK_PROLOG_CHAIN"])
def test_the_check_finds_what_others_can_change(site: Path, tmp_path: Path, how: str, key: str) -> None:
    env = tmp_path / "gres-mig.env"
    env.write_text(f"{key}={site}\n")
    before = list(check_chain.programs(str(env)))
    program = spoil(site, how)
    env.write_text(f"{key}={program}\n")
    (found,) = check_chain.programs(str(env))

    assert before == []
    assert (found.level, found.text.partition(", but ")[0]) == ("problem", f"{key} runs {program}")
    assert re.match(r"run: (chmod go-w|chown root:root) /", found.todo)


def test_the_check_looks_at_all_that_a_pattern_names(site: Path, tmp_path: Path) -> None:
    script = tmp_path / "site_prolog.sh"
    script.write_text(setup._ALL_OF.format(pattern=f"{site.parent}/*"))
    script.chmod(0o755)
    env = tmp_path / "gres-mig.env"
    env.write_text(f"PROLOG_CHAIN={script}\n")
    before = list(check_chain.programs(str(env)))
    spoil(site, "file")

    assert before == []
    assert [f"{site} can be written" in found.text for found in check_chain.programs(str(env))] == [True]


def test_the_check_finds_what_is_no_program(tmp_path: Path) -> None:
    env = tmp_path / "gres-mig.env"
    env.write_text("PROLOG_CHAIN=/nowhere/site\n")

    assert [found.text for found in check_chain.programs(str(env))] == [
        f"PROLOG_CHAIN in {env} is no program: /nowhere/site"
    ]


@pytest.mark.parametrize(("owner", "mode", "wrong"), [(0, 0o644, 0), (64030, 0o600, 0), (1, 0o644, 1), (0, 0o664, 1)])
def test_the_check_finds_a_submit_script_that_others_can_change(
    tmp_path: Path, owner: int, mode: int, wrong: int
) -> None:
    script = tmp_path / "job_submit.site.lua"
    script.touch()
    script.chmod(mode)
    os.chown(script, owner, -1)
    conf = conf_lines.read(str(tmp_path / "slurm.conf"))
    running = Running(conf, {"slurmuser": "slurm(64030)"}, {}, "n1")

    assert len(list(check_chain.submit_script(running))) == wrong


def test_a_site_without_any_has_nothing_to_check(tmp_path: Path) -> None:
    running = Running(conf_lines.read(str(tmp_path / "slurm.conf")), {}, {}, "n1")

    assert list(check_chain.submit_script(running)) == []
    assert list(check_chain.programs(str(tmp_path / "gres-mig.env"))) == []
