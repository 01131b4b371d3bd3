"""The command line as such: what it takes, what it refuses, what it prints and how it ends."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from command_line import Answer, here, run

from gres_mig import __version__, cli, config_text
from gres_mig.simulator.admin import Node
from gres_mig.simulator.program import command, environment

KERNEL = "3f2b9c1e-8a4d-4c6e-9b1a-0123456789ab"


@pytest.fixture
def node(node: Node) -> Node:
    """Two RTX PRO 6000, all managed."""
    config_text.write_node_config(node.store.folder)
    return node


def on(node: Node, *words: str) -> Answer:
    return here("--node", node.store.folder, *words)


def ask(node: Node, *words: str) -> Answer:
    return on(node, "allocate", *words, "--json")


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    """Every command, as the words that name it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        yield (*path, name)
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield from commands(found, *path, name)


ALL = sorted(commands(cli.gres_mig))


@pytest.mark.parametrize(
    ("size", "mib"),
    [("8000", 8000), ("8G", 8192), ("8g", 8192), ("8GiB", 8192), ("8192M", 8192), ("8388608K", 8192), ("1", 1)],
)
def test_a_size_is_in_mib_or_has_a_binary_unit(node: Node, size: str, mib: int) -> None:
    assert ask(node, "--owner", "manual:a", "--memory", size).plain["requested_mib"] == mib


@pytest.mark.parametrize(
    "size",
    [
        *("", "0", "00", "0G", "-1", "+1", "1.5", "8.0", "8,000", "8_000", "1e3", "0x10", "8 000", " 8000", "8000 "),
        *("８０００", "٨٠٠٠", "²", "8GB", "8T", "8KB", "G", "K8", "8G8", "NaN", "8\n", "8\x00", "08000", "1K"),
        *("97281", "2147483648", "99999999999999999999", "9" * 5000, "9000000G"),
    ],
)
def test_what_is_no_size_or_too_large_is_refused_in_one_line_and_changes_nothing(node: Node, size: str) -> None:
    before = node.hardware()

    answer = ask(node, "--owner", "manual:a", "--memory", size)

    assert answer.code == 2
    assert answer.plain["error"]["fault"] == "request"
    assert answer.err.startswith("gres-mig: ")
    assert answer.err.count("\n") == 1
    assert len(answer.err) < 300
    assert node.hardware() == before
    assert not (Path(node.store.folder) / "state" / "state.json").exists()


@pytest.mark.parametrize("owner", ["manual:alice", "slurm:alpha:4711", f"jupyter:1000:{KERNEL}"])
def test_an_owner_is_a_job_a_kernel_or_a_name(node: Node, owner: str) -> None:
    assert ask(node, "--owner", owner, "--memory", "8000").plain["owner"] == owner
    assert on(node, "reclaim", owner).code == 0


@pytest.mark.parametrize("owner", ["", "alice", "manual:", "manual:a b", "slurm:alpha", "slurm:alpha:0", "jupyter:a:b"])
@pytest.mark.parametrize("words", [["allocate", "--memory", "8000", "--owner"], ["reclaim"], ["env"]])
def test_what_is_no_owner_is_refused(node: Node, words: list[str], owner: str) -> None:
    answer = on(node, *words, owner)

    assert answer.code == 2
    assert answer.err.startswith("gres-mig: owner ")


def test_an_allocation_in_json_has_what_its_schema_says(node: Node) -> None:
    answer = ask(node, "--owner", "manual:a", "--memory", "8000")

    (there,) = node.instances()
    assert answer.plain == {
        "schema": 1,
        "owner": "manual:a",
        "requested_mib": 8000,
        "requested_profile": None,
        "profile": {"id": 14, "name": "1g.24gb", "memory_mib": 24192},
        "placement": {"start": there.start, "size": there.size},
        "gpu_uuid": there.gpu_uuid,
        "gi_id": there.id,
        "ci_id": 0,
        "mig_uuid": there.mig_uuids[0],
        "isolation": "env",
        "boot_id": node.boot_id,
        "created": True,
    }


def test_an_error_in_json_has_what_its_schema_says(node: Node) -> None:
    ask(node, "--owner", "manual:a", "--memory", "8000")

    answer = ask(node, "--owner", "manual:a", "--memory", "30000")

    assert answer.plain == {
        "schema": 1,
        "error": {
            "fault": "request",
            "code": "CONFLICT",
            "message": "manual:a holds 1g.24gb for 8,000 MiB; it cannot also have 30,000 MiB",
            "hint": "run: gres-mig reclaim manual:a",
            "blockers": ["manual:a"],
        },
    }
    assert answer.err == "gres-mig: " + "; ".join(answer.plain["error"][key] for key in ("message", "hint")) + "\n"


def test_a_profile_is_asked_for_by_name(node: Node) -> None:
    answer = ask(node, "--owner", "manual:a", "--profile", "1g.24gb+me")

    assert (answer.plain["requested_mib"], answer.plain["requested_profile"]) == (None, "1g.24gb+me")
    assert answer.plain["profile"]["name"] == "1g.24gb+me"


def test_a_gpu_that_is_named_is_the_one_that_serves(node: Node) -> None:
    answer = ask(node, "--owner", "manual:a", "--memory", "8000", "--gpu", node.uuids[1])

    assert answer.plain["gpu_uuid"] == node.uuids[1]


def test_the_exit_code_is_whose_fault_it_is(node: Node) -> None:
    whole = ("--memory", "97000")
    codes = [ask(node, "--owner", f"manual:{name}", *whole).code for name in ("a", "b", "c")]
    codes.append(ask(node, "--owner", "manual:d", "--memory", "97281").code)
    node.unload_driver()
    codes.append(ask(node, "--owner", "manual:e", *whole).code)

    assert codes == [0, 0, 3, 2, 4]


@pytest.mark.parametrize("words", [("status",), ("profiles",), ("doctor",), ("why", "8000"), ("why", "manual:a")])
def test_what_only_looks_prints_one_object_of_the_schema(node: Node, words: tuple[str, ...]) -> None:
    answer = on(node, *words, "--json")

    assert answer.plain["schema"] == 1
    assert answer.out.count("\n") == 1


def test_reclaiming_says_what_became_of_it(node: Node) -> None:
    ask(node, "--owner", "manual:a", "--memory", "8000")

    first, second = on(node, "reclaim", "manual:a", "--json"), on(node, "reclaim", "manual:a", "--json")

    assert [each["verdict"] for each in first.plain["reclaimed"]] == ["released"]
    assert (second.code, second.plain["reclaimed"]) == (0, [])


def test_an_environment_names_one_mig_device(node: Node) -> None:
    uuid = ask(node, "--owner", "manual:a", "--memory", "8000").plain["mig_uuid"]

    answer = on(node, "env", "manual:a")

    shell = subprocess.run(
        ["sh", "-c", f"{answer.out}\necho $CUDA_VISIBLE_DEVICES"], capture_output=True, text=True, check=True
    )
    assert shell.stdout.strip() == uuid
    assert on(node, "env", "manual:b").code == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "Missing command"),
        (("allocat",), "No such command 'allocat'"),
        (("--nod", "x", "status"), "No such option '--nod'"),
        (("--node",), "--node"),
        (("allocate", "--fast"), "No such option '--fast'"),
        (("allocate", "--memory", "8000"), "--owner"),
        (("allocate", "--owner", "manual:a"), "memory"),
        (("allocate", "--owner", "manual:a", "--memory", "1", "--profile", "1g.24gb"), "one of the two"),
        (("allocate", "--owner", "manual:a", "--memory"), "--memory"),
        (("reclaim",), "name an owner"),
        (("reclaim", "manual:a", "--orphans"), "one of them"),
        (("reclaim", "--foreign", "GPU-1:1"), "--yes"),
        (("reclaim", "--foreign", "1", "--yes"), "is not GPU:GI"),
        (("reclaim", "manual:a", "manual:b"), "manual:b"),
        (("adopt", "manual:a"), "GPU:GI"),
        (("adopt", "manual:a", "GPU-1"), "is not GPU:GI"),
        (("env",), "OWNER"),
        (("enable-mig",), "GPU"),
        (("why",), "Missing argument"),
        (("status", "now"), "now"),
        (("simulate",), "Missing command"),
        (("slurm",), "Missing command"),
        (("kernelspec",), "Missing command"),
        (("demo", "--speed", "2"), "--speed"),
    ],
)
def test_a_usage_error_is_one_clear_line_that_ends_with_what_to_type(
    node: Node, words: tuple[str, ...], says: str
) -> None:
    before = node.hardware()

    answer = on(node, *words) if words[:1] not in {("--node",), ("--nod",), ()} else here(*words)

    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("gres-mig: ")
    assert says in answer.err
    assert answer.err.count("\n") == 1
    # As a sentence: a full stop before the semicolon is one too many.
    assert ".;" not in answer.err
    assert node.hardware() == before


def test_a_usage_error_is_json_too_where_json_is_asked_for(node: Node) -> None:
    answer = on(node, "reclaim", "--json")

    assert answer.plain["error"]["code"] == "BADREQ"
    assert answer.plain["error"]["fault"] == "request"


@pytest.mark.parametrize("words", ALL, ids=" ".join)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_command_explains_itself(words: tuple[str, ...], option: str) -> None:
    answer = here(*words, option)

    assert answer.code == 0
    assert answer.out.startswith(f"Usage: gres-mig {' '.join(words)} ")
    assert answer.err == ""


def test_every_command_but_a_group_and_a_program_prints_json() -> None:
    without = [words for words in ALL if "--json" not in here(*words, "--help").out]

    assert sorted(without) == [
        ("kernelspec",),
        ("serve",),
        ("simulate",),
        ("simulate", "work"),
        ("slices",),
        ("slurm",),
    ]


def test_help_lists_every_command_with_what_it_is_for() -> None:
    lines = here("--help").out.splitlines()

    for name in {words[0] for words in ALL}:
        (line,) = [line.split() for line in lines if line.split()[:1] == [name] and line.startswith("  ")]
        assert len(line) > 2


def test_the_version_has_those_of_driver_and_nvml(node: Node) -> None:
    version = on(node, "--version")
    node.unload_driver()
    without = on(node, "--version")

    assert version.out == f"gres-mig {__version__}, driver 580.159.04, NVML 13.580.159.04 (simulated)\n"
    assert (without.code, without.out.startswith(f"gres-mig {__version__}, no driver: ")) == (0, True)


def test_verbose_says_what_was_changed(node: Node) -> None:
    quiet = run("--node", node.store.folder, "allocate", "--owner", "manual:a", "--memory", "8000")
    loud = run("--node", node.store.folder, "-v", "allocate", "--owner", "manual:b", "--memory", "8000")

    assert quiet.err == ""
    assert loud.err.startswith("gres-mig: allocated MIG-")
    assert "manual:b" in loud.err


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("gres-mig al", {"allocate"}),
        ("gres-mig enable-mig --j", {"--json"}),
        ("gres-mig simulate re", {"reboot", "release", "reload", "reset"}),
        ("gres-mig allocate --m", {"--memory"}),
    ],
)
def test_commands_and_options_are_completed(typed: str, offered: set[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}

    answer = run(_GRES_MIG_COMPLETE="bash_complete", **words)

    assert {line.partition(",")[2] for line in answer.out.splitlines()} == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_one_that_its_shell_takes(shell: str) -> None:
    answer = run(_GRES_MIG_COMPLETE=f"{shell}_source")

    assert answer.code == 0
    assert "_GRES_MIG_COMPLETE" in answer.out
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=answer.out, text=True, check=True)


def test_a_reader_that_goes_away_is_no_crash(node: Node) -> None:
    words = command("--node", str(node.store.folder), "status", "--json")
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read().decode()

    assert "Traceback" not in said


def test_a_simulated_node_and_a_configuration_are_not_named_together(node: Node, tmp_path: Path) -> None:
    answer = here("--node", node.store.folder, "--config", tmp_path / "config.toml", "status")

    assert answer.code == 2


def test_a_folder_that_is_no_node_is_said_to_be_none(tmp_path: Path) -> None:
    answer = here("--node", tmp_path, "status", "--json")

    assert answer.code == 4
    assert json.loads(answer.out)["error"]["code"] == "CONFIG"
    assert "gres-mig simulate create" in answer.err
