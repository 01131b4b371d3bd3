"""JupyterHub on one machine, with the node service: a choice in the form, a server, a kernel, an instance, and back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_hub import Form, Hub, HubKernel, Notebook, documented, require_hub
from notebook_server import OTHER_USER, USER, Host, until

require_hub()


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A node of root's with two GPUs, four places for 1g.24gb on each, and its service."""
    with Host([("rtx-pro-6000", 2)]) as host:
        # As the unit's StateDirectory= does; without it there is nowhere to say what is free.
        Path(host.settings.state_dir).mkdir(mode=0o700)
        host.serve()
        yield host


@pytest.fixture(scope="module")
def hub(host: Host) -> Iterator[Hub]:
    """The Hub that docs/jupyterhub.md shows; it looks more often for servers that died."""
    with Hub(f"{documented(0)}\nc.Spawner.poll_interval = 1", {"GRES_MIG_NODE": str(host.folder)}) as hub:
        yield hub


@pytest.fixture(scope="module")
def form(hub: Hub) -> Form:
    """What a user is asked while nothing is taken."""
    return hub.browser(USER).form()


@pytest.fixture(scope="module")
def mine(hub: Hub, form: Form) -> Notebook:
    """A user's server, for which 24,192 MiB for each kernel were chosen in the form."""
    answer = hub.browser(USER).submit(gpu_memory="24192", gpu_share="kernel")
    assert answer.status_code == 302, answer.text
    return hub.notebook(USER)


@pytest.fixture(scope="module")
def others(hub: Hub, form: Form) -> Notebook:
    """Another user's server."""
    return hub.spawn(OTHER_USER, {"gpu_memory": 8000})


@pytest.fixture(scope="module")
def shared(hub: Hub, form: Form) -> Notebook:
    """The first user's second server, whose kernels share 48,512 MiB."""
    return hub.spawn(USER, {"gpu_memory": 48512, "gpu_share": "server"}, server="two")


def device(kernel: HubKernel) -> str:
    """The MIG device that a kernel was told, which is on the hardware."""
    told = kernel.environment()
    assert told["CUDA_VISIBLE_DEVICES"] == told["NVIDIA_VISIBLE_DEVICES"] == told["GRES_MIG_UUID"]
    return told["CUDA_VISIBLE_DEVICES"]


def devices(host: Host) -> set[str]:
    """Those that are on the hardware."""
    return {uuid for instance in host.instances() for uuid in instance.mig_uuids}


def test_the_form_shows_the_sizes_and_how_many_are_free(hub: Hub, form: Form, mine: Notebook) -> None:
    with mine.kernel() as kernel:
        device(kernel)
        later = hub.browser(OTHER_USER).form("later")
        kernel.shutdown()

    assert form.labels == {"gpu_memory": "GPU memory", "gpu_share": "GPU instances"}
    assert form.options["gpu_memory"] == {
        "": "none",
        "24192": "24,192 MiB (1g.24gb), 8 free now",
        "48512": "48,512 MiB (2g.48gb), 4 free now",
        "97280": "97,280 MiB (4g.96gb), 2 free now",
    }
    assert form.chosen == {"gpu_memory": "", "gpu_share": "kernel"}
    assert later.options["gpu_memory"]["24192"] == "24,192 MiB (1g.24gb), 7 free now"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"gpu_memory": "8000\n"}, "it is not a number of MiB; write up to seven digits, such as 8000"),
        ({"gpu_memory": 100000}, "no instance holds that here; choose one of these, in MiB: 24192, 48512, 97280"),
        ({"gpu_memory": 8000, "gpu_share": "all"}, "gpu_share 'all': it is neither kernel nor server"),
        ({"gpu_memory": 8000, "gpu_share": ["kernel"]}, "it is neither kernel nor server"),
        ({"gpu_share": "server"}, "no gpu_memory was chosen to be shared; choose both, or neither"),
        ({"gpu_memory": 8000, "environment": {"GRES_MIG_CONFIG": "/tmp/x"}}, "option 'environment': there is no such"),
        ({"migmem": 8000}, "option 'migmem': there is no such option; use gpu_memory and gpu_share"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_with_what_would_be_right(
    hub: Hub, options: dict[str, object], why: str
) -> None:
    code, said = hub.refused(OTHER_USER, options)

    assert code == 400
    assert why in said
    assert not hub.model(OTHER_USER).get("ready")


def test_a_refused_form_comes_back_with_the_reason(hub: Hub) -> None:
    answer = hub.browser(OTHER_USER).submit(gpu_memory="9<b>8000", gpu_share="kernel")

    assert answer.status_code == 400
    assert "Error: gpu_memory &#39;9&lt;b&gt;8000&#39;: it is not a number of MiB; write up to seven" in answer.text
    assert 'name="gpu_memory"' in answer.text


def test_each_kernel_has_an_instance_of_its_own_from_its_start_to_its_end(host: Host, mine: Notebook) -> None:
    before = devices(host)
    with mine.kernel() as first, mine.kernel() as second:
        told = [device(first), device(second)]
        during = devices(host) - before
        first.shutdown()
        second.shutdown()
    until(lambda: devices(host) == before, "both are given back", log=mine.hub.log)

    assert len(during) == 2
    assert set(told) == during


def test_neither_user_sees_what_is_the_others(mine: Notebook, others: Notebook) -> None:
    with mine.kernel() as kernel, others.kernel() as other:
        told = [device(kernel), device(other)]
        seen = [str(each.expect(200, "GET", "/gres-mig/api/v1/status")) for each in (mine, others)]
        foreign = mine.ask("GET", f"/gres-mig/api/v1/kernels/{other.id}")
        kernel.shutdown()
        other.shutdown()

    assert len(set(told)) == 2
    assert [told[0] in seen[0], told[1] in seen[0]] == [True, False]
    assert [told[0] in seen[1], told[1] in seen[1]] == [False, True]
    assert foreign.code == 404


def test_the_kernels_of_a_server_share_its_instance_if_that_was_chosen(host: Host, shared: Notebook) -> None:
    at_once = devices(host)
    with shared.kernel() as first, shared.kernel() as second:
        told = [device(first), device(second)]
        during = devices(host)
        first.shutdown()
        second.shutdown()

    assert during == at_once
    assert {told[0]} == {told[1]} <= at_once


def test_while_the_service_is_down_servers_start_without_gpu_memory(hub: Hub, host: Host) -> None:
    host.stop_service()
    form = hub.browser(OTHER_USER).form("plain")
    code, said = hub.refused(OTHER_USER, {"gpu_memory": 8000}, server="plain")
    notebook = hub.spawn(OTHER_USER, {"gpu_memory": ""}, server="plain")
    with notebook.kernel() as kernel:
        told = kernel.environment()
    host.serve()

    assert form.options == {}
    assert "No GPU memory can be chosen now: the node service of this node does not answer" in form.text
    assert code == 500
    assert said.startswith("the node service of this node does not answer")
    assert "CUDA_VISIBLE_DEVICES" not in told


def test_a_killed_hub_loses_nothing_and_what_dies_meanwhile_is_given_back(
    hub: Hub, host: Host, mine: Notebook, others: Notebook
) -> None:
    kept, lost = mine.kernel(), others.kernel()
    before = device(kept)
    gone = device(lost)
    kept.run("kept = 1")
    kept.disconnect()
    lost.disconnect()
    hub.stop(signal.SIGKILL)
    others.kill()
    until(lambda: gone not in devices(host), "what died is given back", log=host.log)
    hub.start()
    value = kept.run("print(kept)")
    kept.restart()
    after = device(kept)
    kept.disconnect()
    state = hub.model(USER)["state"]

    assert value == "1"
    assert after == before
    assert (state["gpu_memory"], state["gpu_share"]) == (24192, "kernel")
    assert not hub.model(OTHER_USER).get("ready")


def test_stopping_one_server_gives_back_what_it_had_and_nothing_else(
    hub: Hub, host: Host, mine: Notebook, shared: Notebook
) -> None:
    with mine.kernel() as kernel, shared.kernel() as other:
        told, kept = device(kernel), device(other)
        # JupyterHub's way to end a server, which has no terminal: SIGINT.
        hub.stop_server(USER)
        left = devices(host)

    assert told not in left
    assert kept in left


def test_a_hub_that_is_root_gives_back_what_a_killed_server_had_also_without_the_service(
    hub: Hub, host: Host, shared: Notebook
) -> None:
    with shared.kernel() as kernel:
        told = device(kernel)
        kernel.shutdown()
    host.stop_service()
    shared.kill()
    until(lambda: told not in devices(host), "it is given back", log=hub.log)
    host.serve()

    until(lambda: hub.model(USER, "two").get("stopped", True), "the Hub has seen it", log=hub.log)
