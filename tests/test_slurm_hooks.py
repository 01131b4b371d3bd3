"""The hooks themselves, run as slurmd runs them or worse, against a real controller and real jobs."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import HOOKS, OTHER_USER, USER, Cluster, brought_up, require_slurm

from gres_mig import config, machine
from gres_mig.deadline import operate
from gres_mig.models import Owner, Request
from gres_mig_slurm import job as jobs

require_slurm()

UID = pwd.getpwnam(USER).pw_uid
SHELLS = [shell for shell in ("/bin/sh", "dash", "bash --posix", "busybox sh") if shutil.which(shell.split()[0])]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two nodes with one GPU each."""
    with brought_up(request, {"n1": [("rtx-pro-6000", 1)], "n2": [("rtx-pro-6000", 1)]}) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def clean(cluster: Cluster) -> Iterator[None]:
    """After each test nothing is left of it."""
    yield
    cluster.cancel_all()
    cluster.assert_healthy()


@pytest.fixture(scope="module")
def job(cluster: Cluster) -> int:
    """A job that asked for migmem and is over; the tests run its hooks again, on a node where it never was."""
    job = cluster.sbatch("--gres=migmem:8000", "-wn2")
    cluster.wait(job, "COMPLETED")
    return job


@pytest.fixture(scope="module")
def plain(cluster: Cluster) -> int:
    """A job that asked for no migmem, likewise."""
    job = cluster.sbatch("-wn2")
    cluster.wait(job, "COMPLETED")
    return job


def given(cluster: Cluster, job: int | str, **more: str) -> dict[str, str]:
    """What slurmd gives a hook."""
    return {
        "SLURM_CONF": str(cluster.conf),
        "SLURMD_NODENAME": "n1",
        "SLURM_CLUSTER_NAME": "lab",
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_UID": str(UID),
        **more,
    }


def hook(cluster: Cluster, name: str, env: Mapping[str, str], **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a hook to its end."""
    options: dict[str, Any] = {"cwd": "/", "stdin": subprocess.DEVNULL, "timeout": 60, **more}
    return subprocess.run(
        [cluster.hooks / f"{name}.sh"], env=dict(env), capture_output=True, text=True, check=False, **options
    )


def handed_over(cluster: Cluster, job: int | str) -> dict[str, str]:
    """A hand-over's lines; empty when there is none."""
    file = cluster.handover / f"{job}.n1"
    lines = file.read_text().splitlines() if file.exists() else []
    return dict(line.split("=", 1) for line in lines)


def started(log: Path) -> int:
    """How often a stand-in was run."""
    return len(log.read_text().splitlines()) if log.exists() else 0


# What a hook hands over, and what it costs.


def test_the_hand_over_is_roots_and_readable_to_the_jobs_user(cluster: Cluster, job: int) -> None:
    assert hook(cluster, "prolog", given(cluster, job)).returncode == 0
    status = (cluster.handover / f"{job}.n1").stat()
    (instance,) = cluster.instances("n1")
    lines = handed_over(cluster, job)
    hook(cluster, "epilog", given(cluster, job))

    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o444, 0)
    assert lines["STATE"] == "given"
    assert lines["CUDA_VISIBLE_DEVICES"] == lines["NVIDIA_VISIBLE_DEVICES"] == instance.mig_uuids[0]
    assert stat.S_IMODE(cluster.handover.stat().st_mode) == 0o755


def test_what_was_made_and_destroyed_is_in_the_hooks_own_log(cluster: Cluster, job: int) -> None:
    prolog = hook(cluster, "prolog", given(cluster, job)).stderr
    (instance,) = cluster.instances("n1")
    epilog = hook(cluster, "epilog", given(cluster, job)).stderr

    assert f"gres-mig: allocated {instance.mig_uuids[0]} (1g.24gb) to slurm:lab:{job}\n" in prolog
    assert f"gres-mig: released: 1g.24gb of slurm:lab:{job} at " in epilog


@pytest.mark.parametrize("shell", SHELLS)
def test_the_hooks_do_the_same_in_any_shell(cluster: Cluster, job: int, plain: int, shell: str) -> None:
    said = {}
    for each in (job, plain):
        for name in ("prolog", "task_prolog", "epilog"):
            command = [*shell.split(), cluster.hooks / f"{name}.sh"]
            ran = subprocess.run(command, env=given(cluster, each), capture_output=True, text=True, check=True)
            said[name, each] = ran.stdout, len(cluster.instances("n1"))

    exports, made = said["task_prolog", job]
    assert "export CUDA_VISIBLE_DEVICES=MIG-" in exports
    assert exports.splitlines()[-1].startswith("print gres-mig: 1g.24gb (24,192 MiB) for 8,000 MiB on GPU-")
    assert made == 1
    assert {said[name, plain] for name in ("prolog", "task_prolog", "epilog")} == {("", 0)}
    assert said["epilog", job] == ("", 0)
    assert list(cluster.handover.iterdir()) == []


def test_for_a_job_without_migmem_no_hook_starts_python(cluster: Cluster) -> None:
    log = cluster.folder / "python.log"
    python = cluster.folder / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >>{log}\nexec {shutil.which("true")}\n')
    python.chmod(0o755)
    with cluster.hook_settings(f"PYTHON={python}"):
        ran = cluster.srun("-wn1", "/bin/true")
        cluster.cancel_all()

    assert ran.stdout == ran.stderr == ""
    assert started(log) == 0
    assert list(cluster.handover.iterdir()) == []


def test_the_controller_is_asked_once_and_by_the_prolog_only(cluster: Cluster, job: int) -> None:
    asked, told = cluster.folder / "asked", cluster.folder / "told"
    with (
        cluster.stand_before("squeue", f"echo >>{asked}"),
        cluster.stand_before("scontrol", f"echo >>{told}"),
        cluster.stand_before("scancel", f"echo >>{told}"),
    ):
        for _ in range(2):
            cluster.srun("-wn1", "--gres=migmem:8000", "/bin/true")
            cluster.srun("-wn1", "/bin/true")
        cluster.cancel_all()

    assert started(asked) == 4
    assert started(told) == 0


@pytest.mark.parametrize("gpus", ["", "gpus = []", "# gpus = '*'\nplacement = 'spread'", "gpus=[]"])
def test_a_node_without_a_managed_gpu_leaves_at_once(cluster: Cluster, job: int, gpus: str, tmp_path: Path) -> None:
    asked, file = tmp_path / "asked", tmp_path / "config.toml"
    file.write_text(gpus)
    with (
        cluster.stand_before("squeue", f"echo >>{asked}"),
        cluster.hook_settings(f"CONFIG={file}\nHANDOVER={tmp_path}/none\nSTATE={tmp_path}/none\nPYTHON=/nowhere"),
    ):
        codes = [hook(cluster, name, given(cluster, job)).returncode for name in ("prolog", "task_prolog", "epilog")]

    assert codes == [0, 0, 0]
    assert started(asked) == 0
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("shared", ['slices = "*"', 'gpus = []\nslices = ["GPU-1"]'])
def test_a_node_that_only_shares_its_gpus_asks_what_a_job_wants(
    cluster: Cluster, job: int, shared: str, tmp_path: Path
) -> None:
    asked, file = tmp_path / "asked", tmp_path / "config.toml"
    file.write_text(shared)
    with (
        cluster.stand_before("squeue", f"echo >>{asked}; exit 1"),
        cluster.hook_settings(f"CONFIG={file}\nHANDOVER={tmp_path}"),
    ):
        ran = hook(cluster, "prolog", given(cluster, job))

    assert ran.returncode == 0
    assert started(asked) == 1


def test_a_node_without_any_file_of_ours_leaves_at_once(tmp_path: Path) -> None:
    shutil.copytree(HOOKS, tmp_path / "hooks")
    env = {"SLURM_JOB_ID": "5", "SLURMD_NODENAME": "n1"}
    for name in ("prolog", "task_prolog", "epilog"):
        ran = subprocess.run([tmp_path / "hooks" / f"{name}.sh"], env=env, capture_output=True, text=True, check=True)

        assert ran.stdout == ran.stderr == ""


def test_a_controller_that_does_not_answer_is_not_waited_for(cluster: Cluster, job: int) -> None:
    begun = time.monotonic()
    with cluster.stand_before("squeue", "sleep 30"):
        ran = hook(cluster, "prolog", given(cluster, job))
    took = time.monotonic() - begun
    lines = handed_over(cluster, job)
    hook(cluster, "epilog", given(cluster, job))

    assert ran.returncode == 0
    assert took < 10
    assert lines == {"STATE": "unknown"}
    assert handed_over(cluster, job) == {}


# Hostile environments.


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder of programs that must not be run, each of which says that it was."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in ("env", "timeout", "squeue", "scontrol", "rm", "grep", "mkdir", "python", "python3", "id"):
        program = folder / name
        program.write_text(f"#!/bin/sh\necho {name} >>{folder}/sprung\n")
        program.chmod(0o755)
    return folder


def test_nothing_in_the_environment_changes_what_a_hook_does(cluster: Cluster, job: int, trap: Path) -> None:
    (trap / "sitecustomize.py").write_text(f"open('{trap}/sprung', 'a').write('sitecustomize')")
    (trap / "rc").write_text(f"echo rc >>{trap}/sprung")
    hostile = {
        "PATH": str(trap),
        "IFS": "/:=.|",
        "ENV": f"{trap}/rc",
        "BASH_ENV": f"{trap}/rc",
        "CDPATH": str(trap),
        "PYTHONPATH": str(trap),
        "PYTHONHOME": str(trap),
        "PYTHONSTARTUP": f"{trap}/rc",
        "PYTHONINSPECT": "1",
        "SQUEUE_FORMAT": "%i",
        "SQUEUE_STATES": "PD",
        "SQUEUE_PARTITION": "none",
        "SLURM_TIME_FORMAT": "relative",
        "CONFIG": "/nowhere",
        "HANDOVER": str(trap),
        "PYTHON": str(trap / "python"),
        "SLURM_BIN": str(trap),
        "PROLOG_CHAIN": str(trap / "id"),
        "EPILOG_CHAIN": str(trap / "id"),
        "STATE": "/nowhere",
        "gm_file": str(trap / "x"),
        "gm_rows": "x",
        "SPANK_X": "x",
        "GRES_MIG_UUID": "x",
        "LC_ALL": "tr_TR.UTF-8",
        "SLURM_JOB_NAME": "a\nb",
        "SLURM_JOB_COMMENT": "\udcff" * 50,
        "odd name": "x",
        "POSIXLY_CORRECT": "1",
    }
    prolog = hook(cluster, "prolog", {**hostile, **given(cluster, job)})
    made, lines = cluster.instances("n1"), handed_over(cluster, job)
    epilog = hook(cluster, "epilog", {**hostile, **given(cluster, job)})

    assert (prolog.returncode, epilog.returncode) == (0, 0)
    assert [list(instance.mig_uuids) for instance in made] == [[lines["CUDA_VISIBLE_DEVICES"]]]
    assert cluster.instances("n1") == []
    assert not (trap / "sprung").exists()


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777])
def test_the_umask_changes_no_mode(cluster: Cluster, job: int, mask: int) -> None:
    shutil.rmtree(cluster.handover)
    ran = hook(cluster, "prolog", given(cluster, job), umask=mask)
    modes = [stat.S_IMODE(file.stat().st_mode) for file in (cluster.handover, cluster.handover / f"{job}.n1")]
    records = stat.S_IMODE((cluster.gpus("n1") / "state" / "state.json").stat().st_mode)
    hook(cluster, "epilog", given(cluster, job), umask=mask)

    assert ran.returncode == 0
    assert modes == [0o755, 0o444]
    assert records == 0o600
    assert cluster.instances("n1") == []


def test_closed_descriptors_and_a_folder_that_is_gone_do_no_harm(cluster: Cluster, job: int, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    script = f"mkdir {gone} && cd {gone} && rmdir {gone} && exec %s 0<&- 1>&- 2>&-"
    codes = []
    for name in ("prolog", "epilog"):
        command = ["/bin/sh", "-c", script % (cluster.hooks / f"{name}.sh")]
        env = {**given(cluster, job), "PATH": "/usr/bin:/bin"}
        codes.append(subprocess.run(command, env=env, check=False, timeout=60).returncode)
        codes.append(len(cluster.instances("n1")))

    assert codes == [0, 1, 0, 0]


@pytest.mark.parametrize("name", ["prolog", "epilog"])
@pytest.mark.parametrize(
    "wrong",
    [
        *({"SLURM_JOB_ID": text} for text in ("", "0", "05", "-1", "1.5", "../1", "1 2", "x", "1" * 11, "1\n2")),
        *({"SLURMD_NODENAME": text} for text in ("", "..", "a/b", "a b", ".n1", "n1\n", "$(id)", "n1;id")),
    ],
)
def test_what_is_no_job_or_no_node_is_refused(cluster: Cluster, name: str, wrong: dict[str, str]) -> None:
    before = cluster.state_of("n1")
    text = (cluster.gpus("n1") / "config.toml").as_posix()
    with cluster.hook_settings(f"CONFIG={text}"):
        ran = hook(cluster, name, given(cluster, "7", **wrong))

    assert ran.returncode == 64
    assert cluster.state_of("n1") == before
    assert list(cluster.handover.iterdir()) == []


def test_a_name_that_looks_like_an_answer_gets_nothing(cluster: Cluster) -> None:
    odd = "x TresPerNode=gres:migmem:90000 AdminComment=gres-mig:1:90000\nJobId=1|1|migmem:90000|gres-mig:1:90000"
    options = (f"--job-name={odd}", f"--comment={odd}", "-wn1")
    silent = cluster.srun(*options, "/bin/sh", "-c", "echo [$GRES_MIG_PROFILE]")
    asked = cluster.srun(*options, "--gres=migmem:8000", "/bin/sh", "-c", "echo [$GRES_MIG_PROFILE]")

    assert silent.stdout == "[]\n"
    assert asked.stdout.splitlines()[-1] == "[1g.24gb]"


def test_only_root_may_run_prolog_and_epilog(cluster: Cluster, job: int) -> None:
    hook(cluster, "prolog", given(cluster, job))
    before = cluster.state_of("n1")
    other = pwd.getpwnam(OTHER_USER)
    codes = [
        hook(cluster, name, given(cluster, job), user=other.pw_uid, group=other.pw_gid, extra_groups=[]).returncode
        for name in ("prolog", "epilog")
    ]
    after = cluster.state_of("n1")
    hook(cluster, "epilog", given(cluster, job))

    assert all(codes)
    assert after == before
    assert len(before["records"]) == 1


def test_a_prolog_writes_nothing_where_a_user_could_put_links(cluster: Cluster, job: int) -> None:
    os.chown(cluster.handover.parent, UID, -1)
    try:
        ran = hook(cluster, "prolog", given(cluster, job))
    finally:
        os.chown(cluster.handover.parent, 0, -1)
    cluster.wait_drained("n1")
    cluster.resume("n1")

    assert (ran.returncode, "is not root's" in ran.stderr) == (1, True)
    assert handed_over(cluster, job) == {}


def test_a_user_cannot_change_his_own_hand_over(cluster: Cluster, job: int) -> None:
    hook(cluster, "prolog", given(cluster, job))
    file = cluster.handover / f"{job}.n1"
    before = file.read_text()
    for forge in (f"chmod u+w {file}", f"echo STATE=none >{file}", f"rm -f {file}", f"ln {file} {file}.mine"):
        ran = subprocess.run(["/bin/sh", "-c", forge], user=UID, group=UID, extra_groups=[], check=False)
        assert ran.returncode != 0, forge
    after = file.read_text()
    hook(cluster, "epilog", given(cluster, job))

    assert before == after
    assert cluster.instances("n1") == []
    assert list(cluster.handover.iterdir()) == []


@pytest.mark.parametrize("which", ["job", "plain"])
@pytest.mark.parametrize("closed", ["slurm", "."])
def test_where_a_user_cannot_look_for_the_hand_over_only_migmem_is_refused(
    cluster: Cluster, request: pytest.FixtureRequest, which: str, closed: str
) -> None:
    env = {**given(cluster, request.getfixturevalue(which)), "SLURM_STEP_ID": "0"}
    folder = cluster.handover.parent / closed
    hook(cluster, "prolog", env)
    folder.chmod(0o700)
    try:
        ran = hook(cluster, "task_prolog", env, user=UID, group=UID, extra_groups=[])
    finally:
        folder.chmod(0o755)
    hook(cluster, "epilog", env)

    assert ran.returncode == (which == "job")
    assert ("this node did not prepare the job" in ran.stdout) == (which == "job")
    assert "export" not in ran.stdout


@pytest.mark.parametrize("first", ["", "9999999     |1   |\n"])
def test_a_job_that_squeue_lists_after_others_of_its_array_is_known(cluster: Cluster, plain: int, first: str) -> None:
    rows = f"{first}{plain}         |{plain}    |"
    with cluster.stand_before("squeue", f"printf '%s\\n' '{rows}'; exit 0"):
        hook(cluster, "prolog", given(cluster, plain))
        lines = handed_over(cluster, plain)
        (cluster.handover / f"{plain}.n1").unlink()
        task = hook(cluster, "task_prolog", given(cluster, plain))
    hook(cluster, "epilog", given(cluster, plain))

    assert lines == {"STATE": "none"}
    # Of whom nobody knows, sees no GPU.
    assert task.stdout == ""


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_a_hook_whose_shell_is_gone_does_nothing(cluster: Cluster, job: int, name: str) -> None:
    with subprocess.Popen(["/bin/true"]) as gone:
        gone.wait()
    before = cluster.state_of("n1")
    words = [str(job), "n1", "lab", str(cluster.gpus("n1") / "config.toml"), str(cluster.handover), str(gone.pid)]
    command = [sys.executable, "-I", "-m", f"gres_mig_slurm.{name}", *words]
    ran = subprocess.run(command, input="", env=given(cluster, job), capture_output=True, text=True, check=False)

    assert ran.returncode == 70
    assert "was ended from outside; nothing was changed" in ran.stderr
    assert cluster.state_of("n1") == before
    assert list(cluster.handover.iterdir()) == []


# Out of turn.


def test_a_prolog_that_runs_twice_makes_one_instance(cluster: Cluster, job: int) -> None:
    first = hook(cluster, "prolog", given(cluster, job)), handed_over(cluster, job)
    second = hook(cluster, "prolog", given(cluster, job)), handed_over(cluster, job)
    made = cluster.instances("n1")
    hook(cluster, "epilog", given(cluster, job))

    assert first[1] == second[1]
    assert len(made) == 1
    assert cluster.instances("n1") == []


def test_an_epilog_that_runs_again_or_five_times_at_once_does_no_harm(cluster: Cluster, job: int) -> None:
    hands = cluster.hands("n1")
    hook(cluster, "prolog", given(cluster, job))
    command, env = [cluster.hooks / "epilog.sh"], given(cluster, job)
    at_once = [subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) for _ in range(5)]
    codes = [each.wait(60) for each in at_once]
    left = cluster.instances("n1")
    hands.configure(log="all")
    again = hook(cluster, "epilog", given(cluster, job))
    hands.configure(log="off")

    assert codes == [0] * 5
    assert left == []
    assert again.returncode == 0
    assert hands.calls() == []


def test_an_epilog_without_a_prolog_records_nothing(cluster: Cluster) -> None:
    before = cluster.state_of("n1")
    ran = hook(cluster, "epilog", given(cluster, 4711))

    assert ran.returncode == 0
    assert ran.stderr == ""
    assert cluster.state_of("n1") == before


def test_an_epilog_finds_an_instance_of_which_only_the_records_tell(cluster: Cluster, job: int) -> None:
    hook(cluster, "prolog", given(cluster, job))
    (cluster.handover / f"{job}.n1").unlink()
    ran = hook(cluster, "epilog", given(cluster, job))

    assert ran.returncode == 0
    assert cluster.instances("n1") == []


def test_an_epilog_after_a_reboot_forgets_what_the_reboot_took(cluster: Cluster, job: int) -> None:
    hook(cluster, "prolog", given(cluster, job))
    cluster.hands("n1").reboot()
    shutil.rmtree(cluster.handover)
    ran = hook(cluster, "epilog", given(cluster, job))
    cluster.handover.mkdir()
    # Which these boards forget at a reboot.
    cluster.hands("n1").set_mig(0, True)

    assert ran.returncode == 0
    assert cluster.state_of("n1")["records"] == []


def test_a_prolog_that_an_epilog_has_overtaken_gives_back_what_it_made(cluster: Cluster, job: int) -> None:
    hands = cluster.hands("n1")
    hands.configure(create_s=1.0)
    with subprocess.Popen([cluster.hooks / "prolog.sh"], env=given(cluster, job), stderr=subprocess.DEVNULL) as prolog:
        cluster.until(lambda: cluster.state_of("n1")["records"], "the intent")
        hook(cluster, "epilog", given(cluster, job))
        code = prolog.wait(60)
    hands.configure(create_s=0.0)

    assert code == 0
    assert cluster.instances("n1") == []
    assert cluster.state_of("n1")["records"] == []
    assert handed_over(cluster, job) == {}


def test_an_epilog_that_comes_while_the_controller_is_asked_is_not_forgotten(cluster: Cluster, job: int) -> None:
    asked, go = cluster.folder / "asked-now", cluster.folder / "go"
    waits = f"touch {asked}; while [ ! -e {go} ]; do sleep 0.05; done"
    with (
        cluster.stand_before("squeue", waits),
        subprocess.Popen([cluster.hooks / "prolog.sh"], env=given(cluster, job), stderr=subprocess.DEVNULL) as prolog,
    ):
        cluster.until(asked.exists, "the question")
        hook(cluster, "epilog", given(cluster, job))
        go.touch()
        prolog.wait(60)

    assert cluster.instances("n1") == []
    assert cluster.state_of("n1")["records"] == []


def test_what_an_earlier_run_of_a_job_left_is_given_back_first(cluster: Cluster, job: int) -> None:
    settings = config.load(cluster.gpus("n1") / "config.toml")
    earlier = Owner(f"slurm:lab:{job}", UID, submitted=1000)
    operate(settings, lambda allocator: allocator.allocate(earlier, Request(40000), begin=machine.now_ns()))
    ran = hook(cluster, "prolog", given(cluster, job))
    made = [instance.profile for instance in cluster.instances("n1")]
    hook(cluster, "epilog", given(cluster, job))

    assert ran.returncode == 0
    assert made == ["1g.24gb"]
    assert cluster.instances("n1") == []


# A site's own hooks.


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site's hook, which says what it was given and ends with 7."""
    program = tmp_path / "site"
    program.write_text(
        f"#!/bin/sh\n/usr/bin/tr '\\0' '\\n' </proc/$$/environ >{tmp_path}/seen\numask >{tmp_path}/mask\n"
        f"/bin/ls {tmp_path}/../ >/dev/null; echo 'export SITE=1'; exit 7\n"
    )
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("which", ["job", "plain"])
@pytest.mark.parametrize("name", ["prolog", "epilog", "task_prolog"])
def test_a_sites_own_hook_runs_after_ours_as_slurmd_would_have_run_it(
    cluster: Cluster, request: pytest.FixtureRequest, site: Path, name: str, which: str
) -> None:
    job: int = request.getfixturevalue(which)
    env = given(cluster, job, ODD="a b")
    if name != "prolog":
        hook(cluster, "prolog", env)
    with cluster.hook_settings(f"PROLOG_CHAIN={site}\nEPILOG_CHAIN={site}\nTASK_PROLOG_CHAIN={site}"):
        ran = hook(cluster, name, env, umask=0o027)
    there = cluster.instances("n1")
    hook(cluster, "epilog", env)

    seen = dict(line.split("=", 1) for line in (site.parent / "seen").read_text().splitlines())
    assert ran.returncode == 7
    assert "export SITE=1" in ran.stdout
    assert {key: value for key, value in seen.items() if key not in ("PWD", "OLDPWD", "_", "SHLVL")} == env
    assert (site.parent / "mask").read_text() == "0027\n"
    assert len(there) == (which == "job" and name != "epilog")


def test_a_sites_own_epilog_runs_even_where_ours_has_failed(cluster: Cluster, job: int, site: Path) -> None:
    hook(cluster, "prolog", given(cluster, job))
    with cluster.hook_settings(f"EPILOG_CHAIN={site}\nPYTHON=/nowhere"):
        ran = hook(cluster, "epilog", given(cluster, job))
    cluster.wait_drained("n1")
    cluster.resume("n1")
    hook(cluster, "epilog", given(cluster, job))

    assert ran.returncode == 7
    assert (site.parent / "seen").exists()
    assert cluster.instances("n1") == []


# The text of the hooks.


@pytest.mark.parametrize("name", ["prolog", "epilog", "task_prolog"])
def test_the_hooks_are_plain_shell(name: str) -> None:
    for shell in ("dash", "bash"):
        if program := shutil.which(shell):
            subprocess.run([program, "-n", HOOKS / f"{name}.sh"], check=True)

    assert os.access(HOOKS / f"{name}.sh", os.X_OK)


def test_the_prolog_asks_for_the_fields_that_are_read() -> None:
    assert f"--Format='{jobs.FORMAT}'" in (HOOKS / "prolog.sh").read_text()
