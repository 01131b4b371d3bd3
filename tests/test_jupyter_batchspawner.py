"""JupyterHub's servers as jobs of a real Slurm: the job has the instance, and nothing else reaches its script."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_hub import Form, Hub, Notebook, documented, require_hub
from notebook_server import OTHER_USER, USER
from slurm_cluster import Cluster, brought_up, require_slurm

require_slurm()
require_hub()


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One node with one RTX PRO 6000, and the sizes file beside slurm.conf."""
    with brought_up(request, {"n1": [("rtx-pro-6000", 1)]}, priced=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def hub(cluster: Cluster) -> Iterator[Hub]:
    """The Hub that docs/jupyterhub.md shows, and what this cluster's place needs."""
    # The lab's node names are no host names, and its slurm.conf is not where everybody looks for it.
    here = 'c.Spawner.env_keep = ["PATH", "SLURM_CONF"]\nc.SlurmSpawner.state_exechost_exp = "127.0.0.1"'
    with Hub(f"{documented(1)}\n{here}", {"SLURM_CONF": str(cluster.conf)}) as hub:
        yield hub


@pytest.fixture(scope="module")
def form(hub: Hub) -> Form:
    """What the user is asked."""
    return hub.browser(USER).form()


@pytest.fixture(scope="module")
def notebook(hub: Hub) -> Notebook:
    """The user's server, for which 24,192 MiB were chosen in the form."""
    answer = hub.browser(USER).submit(gpu_memory="24192")
    assert answer.status_code == 302, answer.text
    return hub.notebook(USER)


@pytest.fixture(scope="module")
def without(hub: Hub) -> Notebook:
    """A server for which nothing was chosen."""
    return hub.spawn(OTHER_USER, {"gpu_memory": 0})


def jobs(cluster: Cluster) -> list[str]:
    """Every job that was ever submitted, and what it asked for."""
    return cluster.run("squeue", "-h", "-t", "all", "-o", "%A %b", user="root").stdout.splitlines()


def owners(cluster: Cluster) -> list[str]:
    """Whose the records of the node are."""
    return [record["owner"]["name"] for record in cluster.state_of("n1")["records"]]


def test_the_form_shows_the_sizes_of_the_cluster(form: Form) -> None:
    assert form.labels == {"gpu_memory": "GPU memory"}
    assert form.options["gpu_memory"] == {
        "": "none",
        "24192": "24,192 MiB (1g.24gb)",
        "48512": "48,512 MiB (2g.48gb)",
        "97280": "97,280 MiB (4g.96gb)",
    }


def test_the_kernels_of_a_server_share_the_instance_of_its_job(hub: Hub, cluster: Cluster, notebook: Notebook) -> None:
    job = hub.model(USER)["state"]["job_id"]
    with notebook.kernel() as first, notebook.kernel() as second:
        told = [first.environment(), second.environment()]
        first.restart()
        told.append(first.environment())
    (instance,) = cluster.instances()

    assert instance.profile == "1g.24gb"
    assert [each["CUDA_VISIBLE_DEVICES"] for each in told] == [*instance.mig_uuids] * 3
    assert owners(cluster) == [f"slurm:lab:{job}"]


def test_a_hub_that_is_killed_and_started_again_has_lost_nothing(
    hub: Hub, cluster: Cluster, notebook: Notebook
) -> None:
    before = owners(cluster)
    with notebook.kernel() as kernel:
        kernel.run("kept = 1")
        kernel.disconnect()
        hub.stop(signal.SIGKILL)
        hub.start()
        kept = kernel.run("print(kept)")

    assert kept == "1"
    assert hub.model(USER)["ready"]
    assert owners(cluster) == before


def test_a_cancelled_job_gives_its_instance_back_whatever_runs_in_its_server(
    hub: Hub, cluster: Cluster, notebook: Notebook
) -> None:
    kernel = notebook.kernel()
    cluster.scancel(hub.model(USER)["state"]["job_id"])
    cluster.until(lambda: not cluster.instances(), "no instance left")
    cluster.until(lambda: owners(cluster) == [], "no record left")

    assert hub.model(USER)["ready"], "the Hub finds out when it looks"
    assert kernel.id


def test_a_server_for_which_nothing_was_chosen_has_no_gpu(hub: Hub, cluster: Cluster, without: Notebook) -> None:
    job = cluster.job(hub.model(OTHER_USER)["state"]["job_id"])
    with without.kernel() as kernel:
        told = kernel.environment()

    assert job["JobState"] == "RUNNING"
    assert "migmem" not in str(job)
    assert "CUDA_VISIBLE_DEVICES" not in told
    assert "JUPYTER_DEFAULT_PROVISIONER_NAME" not in told


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"gpu_memory": "8000\n#SBATCH --qos=vip"}, "it is not a number of MiB"),
        ({"gpu_memory": "8000;touch {mark}"}, "it is not a number of MiB"),
        ({"gpu_memory": 100000}, "no instance holds that here; choose one of these, in MiB: 24192, 48512, 97280"),
        ({"migmem": "8000"}, "option 'migmem': there is no such option; use gpu_memory"),
        ({"migmem": "8000\n#SBATCH --qos=vip", "prologue": "touch {mark}"}, "there is no such option"),
        ({"gpu_memory": "8000", "prologue": "touch {mark}"}, "option 'prologue': there is no such option"),
        ({"gpu_memory": "8000", "cmd": "touch {mark}"}, "option 'cmd': there is no such option"),
    ],
)
def test_no_job_is_submitted_for_options_that_say_anything_else(
    hub: Hub, cluster: Cluster, options: dict[str, object], why: str
) -> None:
    mark = cluster.home / "mark"
    before = jobs(cluster)
    asked = {name: value.format(mark=mark) if isinstance(value, str) else value for name, value in options.items()}
    code, said = hub.refused(USER, asked)

    assert code == 400
    assert why in said
    assert jobs(cluster) == before
    assert not mark.exists()


def test_a_servers_own_token_changes_nothing_of_its_spawner_but_the_port(
    hub: Hub, without: Notebook, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    with without.kernel() as kernel:
        token = kernel.environment()["JUPYTERHUB_API_TOKEN"]
    bodies = [
        {"exec_prefix": f"touch {mark};"},
        {"port": 1, "batch_query_cmd": f"touch {mark}"},
        {"port": "1"},
        ["port"],
    ]
    codes = [hub.api("POST", "/batchspawner", body, token=token).code for body in bodies]
    # Stopping asks Slurm with those commands.
    hub.stop_server(OTHER_USER)

    assert codes == [400] * 4
    assert not mark.exists()
