"""Slices in Slurm: a job that finds every instance taken runs on a GPU without MIG, held to its memory."""

from __future__ import annotations

import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import USER, Cluster, brought_up, require_slurm
from vgpu import PROGRAM, require_compiler, slicing

require_slurm()
require_compiler()

JOB = """\
umask 027
srun -n1 python3 -S program.py
env | sed -n 's/^GRES_MIG_ISOLATION=/isolation /p; s/^CUDA_VISIBLE_DEVICES=/on /p'
[ -w "$CUDA_DEVICE_MEMORY_SHARED_CACHE" ] && [ ! -w "${CUDA_DEVICE_MEMORY_SHARED_CACHE%/*}" ] && echo his file alone
"""
WRITES = """
open("result", "w").close()
print("sees", total.value >> 20, taken, oct(os.stat("result").st_mode & 0o777))
"""


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One node: an A30, which an admin has taken whole, and an L40 that is shared."""
    # Where the jobs' user may go, which is not below pytest's own folder.
    folder = Path(tempfile.mkdtemp(prefix="gres-mig-"))
    folder.chmod(0o755)
    shared = slicing(folder)
    config = f'slices = "*"\nhami_core = "{shared.hami_core}"\nkeep_umask = "{shared.keep_umask}"'
    with brought_up(request, {"n1": [("a30", 1), ("l40", 1)]}, config=config) as cluster:
        cluster.hands("n1").make(0, "4g.24gb")
        yield cluster
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def counted(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """n1 has an L40 that is shared, n2 an A30 beside it; what they count and what a request counts says the package."""
    folder = Path(tempfile.mkdtemp(prefix="gres-mig-"))
    folder.chmod(0o755)
    shared = slicing(folder)
    config = (
        f'slices = "*"\nslice_reserve = "36000"\nhami_core = "{shared.hami_core}"\nkeep_umask = "{shared.keep_umask}"'
    )
    boards = {"n1": [("l40", 1)], "n2": [("a30", 1), ("l40", 1)]}
    with brought_up(request, boards, config=config, priced=True) as cluster:
        yield cluster
    shutil.rmtree(folder)


def left(cluster: Cluster, node: str = "n1") -> list[Path]:
    """The slices that are there."""
    return list(Path(cluster.gpus(node), "run/slices").glob("*/*"))


def test_a_job_is_held_to_its_slice_and_leaves_nothing(cluster: Cluster) -> None:
    (cluster.home / "program.py").write_text(PROGRAM + WRITES)

    job = cluster.sbatch("--gres=migmem:4000", f"--chdir={cluster.home}", script=JOB)
    cluster.wait(job, "COMPLETED", "FAILED", within=60)
    said = cluster.output(job)
    cluster.until(lambda: left(cluster) == [], "the job's slice gone")

    assert "gres-mig: slice (4,000 MiB) for 4,000 MiB on GPU-" in said
    assert "sees 4000 4000 0o640" in said
    assert "isolation cooperative" in said
    assert f"on {cluster.hands('n1').uuids[1]}" in said
    assert "his file alone" in said


def test_two_jobs_share_the_card_each_with_a_file_of_its_users(cluster: Cluster) -> None:
    jobs = [cluster.sbatch("--gres=migmem:4000", script="echo $CUDA_VISIBLE_DEVICES; sleep 60") for _ in range(2)]
    cluster.until(lambda: all("GPU-" in cluster.output(job) for job in jobs), "both jobs' output")

    there = left(cluster)
    own = [(each / "own/cache").stat() for each in there]
    for job in jobs:
        cluster.scancel(job)
    cluster.until(lambda: left(cluster) == [], "their slices gone")

    assert len(there) == 2
    assert {(each.st_uid, each.st_mode & 0o777) for each in own} == {(pwd.getpwnam(USER).pw_uid, 0o600)}


def test_slices_are_counted_so_that_who_does_not_fit_waits_at_the_controller(counted: Cluster) -> None:
    jobs = [counted.sbatch("-wn1", "--gres=migmem:4000", script="echo begun; sleep 60") for _ in range(2)]
    counted.until(lambda: all("begun" in counted.output(job) for job in jobs), "both jobs begun")
    third = counted.sbatch("-wn1", "--gres=migmem:4000", script="echo $GRES_MIG_ISOLATION")
    counted.until(lambda: counted.job(third).get("Reason") == "Resources", "the third waits")

    there = len(left(counted))
    counted.scancel(jobs[0])
    counted.wait(third, "COMPLETED", within=30)
    counted.scancel(jobs[1])
    counted.until(lambda: left(counted) == [], "all slices gone")

    assert there == 2
    assert {counted.job(job)["TresPerNode"].rpartition(":")[2] for job in (*jobs, third)} == {"4512"}
    assert counted.job(third)["Restarts"] == "0"
    assert counted.output(third).splitlines()[-1] == "cooperative"
    counted.assert_healthy()


def test_what_the_user_preloads_himself_comes_behind_the_limit_once(counted: Cluster, tmp_path: Path) -> None:
    own = counted.home / "own.so"
    (tmp_path / "own.c").write_text("int own;\n")
    subprocess.run(["cc", "-shared", "-o", str(own), str(tmp_path / "own.c")], check=True)
    own.chmod(0o755)

    script = "echo script $LD_PRELOAD; srun -n1 sh -c 'echo step $LD_PRELOAD'"
    job = counted.sbatch("-wn1", "--gres=migmem:4000", f"--export=ALL,LD_PRELOAD={own}", script=script)
    counted.wait(job, "COMPLETED", within=60)
    counted.until(lambda: left(counted) == [], "the job's slice gone")

    preloaded = {line.partition(" ")[0]: line.partition(" ")[2].split(":") for line in counted.output(job).splitlines()}
    assert [Path(each).name for each in preloaded["script"]] == ["keep_umask.so", "libvgpu.so", "own.so"]
    assert preloaded["step"] == preloaded["script"]


def test_who_insists_on_mig_is_put_back_from_a_node_that_has_slices_only_and_begins_when_mig_is_free(
    counted: Cluster,
) -> None:
    hands = counted.hands("n2")
    taken = hands.make(0, "4g.24gb")

    job = counted.sbatch("-wn2", "--gres=migmem:mig:4000", script="echo $GRES_MIG_ISOLATION $GRES_MIG_PROFILE")
    counted.until(lambda: counted.job(job).get("Restarts") == "1", "the job put back")
    other = counted.sbatch("-wn2", "--gres=migmem:4000", script="echo $GRES_MIG_ISOLATION")
    counted.wait(other, "COMPLETED", within=30)
    hands.destroy(0, taken.id)
    counted.wait(job, "COMPLETED", within=60)

    assert counted.output(other).splitlines()[-1] == "cooperative"
    assert counted.output(job).splitlines()[-1] == "env 1g.6gb"
    counted.assert_healthy()
