"""config.toml: what it means, what it may not say, and what is kept of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import settings as searching
from hypothesis import strategies as st

from gres_mig import config, config_schema
from gres_mig.config_text import render, write, write_node_config
from gres_mig.errors import BadRequest, ConfigError, Fault
from gres_mig.models import Gpu, Placement, Profile, Settings
from gres_mig.serving import Serving
from gres_mig.values import replace

ROOT = Path(__file__).parent.parent
UUID = "GPU-5f8a3c1e-0d2b-4e6f-9a7c-1b2d3e4f5a6b"
OTHER = "GPU-00000000-0000-0000-0000-000000000001"
FILE = "/etc/gres-mig/config.toml"
DEFAULTS = config.defaults()

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def gpu(uuid: str = UUID, index: int = 0, pci: str = "00000000:41:00.0", model: str = "NVIDIA A30") -> Gpu:
    profiles = (
        Profile(14, "1g.6gb", 5952, 1, 14, 4, (Placement(0, 1), Placement(1, 1))),
        Profile(21, "1g.6gb+me", 5952, 1, 14, 1, (Placement(0, 1),), variant=True),
    )
    return Gpu(uuid, index, index, pci, model, 24576, True, True, profiles)


def validated(text: str, name: str = "") -> Settings:
    return config_schema.validate(text, DEFAULTS, name)


def refusal(text: str, name: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        validated(text, name)
    assert caught.value.fault is Fault.NODE
    return str(caught.value)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose /etc/gres-mig, /run/gres-mig and /var/lib/gres-mig are folders below this one."""
    for folder in ("etc", "run", "lib"):
        (tmp_path / folder).mkdir(mode=0o755)
    monkeypatch.setattr(config, "CONFIG_PATH", str(tmp_path / "etc" / "config.toml"))
    monkeypatch.setattr(config, "RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(config, "STATE_DIR", str(tmp_path / "lib"))
    return tmp_path


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The folder of a simulated node."""
    write_node_config(tmp_path / "node")
    return tmp_path / "node"


def written(file: Path, text: str, mode: int = 0o644) -> Path:
    file.write_text(text)
    file.chmod(mode)
    return file


# Where settings come from


def test_a_machine_without_a_file_manages_no_gpu(machine: Path) -> None:
    settings = config.load()

    assert settings.managed == ()
    assert settings.state_dir == str(machine / "lib")
    assert settings.run_dir == str(machine / "run")
    assert not settings.manages(gpu())


def test_the_paths_of_a_real_node_are_those_of_the_manual() -> None:
    assert config.defaults() == Settings("/var/lib/gres-mig", "/run/gres-mig", FILE)


def test_a_machine_reads_its_own_file(machine: Path) -> None:
    written(machine / "etc" / "config.toml", f'gpus = ["{UUID}"]\nlock_wait = 7\n')

    settings = config.load()

    assert settings.managed == (UUID,)
    assert settings.lock_wait_s == 7


def test_a_file_that_was_asked_for_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: there is no such file"):
        config.load(tmp_path / "none.toml")


def test_a_folder_that_holds_no_node_is_answered_by_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"run: gres-mig simulate create {tmp_path} "):
        config.load(node=tmp_path)


def test_a_node_keeps_everything_in_its_folder_and_manages_all_its_gpus(node: Path) -> None:
    settings = config.load(node=node)

    assert settings == Settings(
        str(node / "state"), str(node / "run"), str(node / "config.toml"), str(node), managed=("*",)
    )
    assert {entry.name for entry in node.iterdir()} == {"config.toml", "run", "state"}


def test_the_file_of_a_node_means_the_same_node_without_naming_the_folder(machine: Path, node: Path) -> None:
    assert config.load(node / "config.toml") == config.load(node=node)


def test_a_node_may_be_moved(node: Path) -> None:
    moved = node.rename(node.parent / "moved")

    assert config.load(node=moved).state_dir == str(moved / "state")
    assert config.load(moved / "config.toml").simulator == str(moved)


def test_the_file_of_a_node_cannot_name_another_node(node: Path, tmp_path: Path) -> None:
    written(node / "config.toml", f'simulator = "{tmp_path}"\n')

    with pytest.raises(ConfigError, match=r'config\.toml:1: simulator: found ".*"; accepted: in the file of a sim'):
        config.load(node=node)


def test_a_node_and_a_file_cannot_both_be_named(node: Path) -> None:
    with pytest.raises(BadRequest):
        config.load(node / "config.toml", node=node)


def test_folders_are_relative_to_the_file(machine: Path) -> None:
    file = written(machine / "etc" / "other.toml", 'state_dir = "../records"\nsimulator = "sim"\n')

    settings = config.load(file)

    assert settings.simulator == str(machine / "etc" / "sim")
    assert settings.run_dir == str(machine / "etc" / "sim" / "run")
    assert settings.state_dir == str(machine / "records")


# What a file may say


def test_every_key_arrives_where_it_is_used() -> None:
    settings = validated(
        """
        gpus = "*"
        placement = "spread"
        compute = "least"
        upsize = true
        reserve = "2G"
        mig_at_boot = true
        bare = "quarantine"
        bare_grace = 1
        hardware_timeout = 2.5
        lock_wait = 3
        in_use_wait = 4
        admission = "gates"
        user_memory = "48G"
        user_instances = 5
        user_requests = 6
        user_connections = 7
        metrics_port = 9100
        state_dir = "/srv/gres-mig"
        simulator = "/srv/simulated"
        [profiles]
        "NVIDIA A30" = ["1g.6gb"]
        """
    )

    assert settings == Settings(
        state_dir="/srv/gres-mig",
        run_dir="/srv/simulated/run",
        config_path=FILE,
        simulator="/srv/simulated",
        managed=("*",),
        allowed={"NVIDIA A30": ("1g.6gb",)},
        placement="spread",
        compute="least",
        upsize=True,
        reserve_mib=2048,
        mig_at_boot=True,
        bare="quarantine",
        bare_grace_s=1.0,
        hardware_timeout_s=2.5,
        lock_wait_s=3.0,
        in_use_wait_s=4.0,
        admission="gates",
        serving=Serving(49152, 5, 6, 7, 9100),
    )


@pytest.mark.parametrize("address", ["41:00.0", "0000:41:00.0", "00000000:41:00.0"])
def test_a_gpu_is_managed_by_its_pci_address_however_it_is_written(address: str) -> None:
    settings = validated(f'gpus = ["{address}"]')

    assert settings.manages(gpu(pci="00000000:41:00.0"))
    assert not settings.manages(gpu(OTHER, pci="00000000:42:00.0"))


def test_a_pci_address_may_be_in_either_case() -> None:
    settings = validated('gpus = ["000A:AF:00.0"]')

    assert settings.managed == ("0000000a:af:00.0",)
    assert settings.manages(gpu(pci="0000000A:AF:00.0"))


def test_a_gpu_named_twice_is_managed_once() -> None:
    assert validated('gpus = ["41:00.0", "0000:41:00.0"]').managed == ("00000000:41:00.0",)


@pytest.mark.parametrize(("reserve", "mib"), [('"0"', 0), ("0", 0), ("512", 512), ('"512"', 512), ('"2g"', 2048)])
def test_the_reserve_is_a_size_or_nothing(reserve: str, mib: int) -> None:
    assert validated(f"reserve = {reserve}").reserve_mib == mib


# What a file may not say


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('gpu = "*"', "1: gpu: found an unknown key; accepted: those in docs/config.md; did you mean gpus?"),
        ("[profile]\na = 1", "1: profile: found an unknown key; accepted: …; did you mean profiles?"),
        ("zzz = 1", "1: zzz: found an unknown key; accepted: …, simulator"),
        ('gpus = "all"', '1: gpus: found "all"; accepted: "*" for all, or a list of …'),
        (f'gpus = "{UUID}"', f'1: gpus: found "{UUID}"; …; write gpus = ["{UUID}"]'),
        ('gpus = ["*"]', '1: gpus: found "*"; …; for all GPUs write gpus = "*"'),
        ("gpus = 1", '1: gpus: found 1; accepted: "*" for all, …'),
        ("gpus = [0]", "1: gpus: found 0; …; an index changes from boot to boot; …"),
        ('gpus = ["GPU-1"]', '1: gpus: found "GPU-1"; accepted: …'),
        (f'gpus = ["GPU-{UUID[4:].upper()}"]', f"1: gpus: …; NVML writes it {UUID}"),
        (f'gpus = ["MIG-{UUID[4:]}"]', "1: gpus: …; that is a MIG device; name the GPU it is on"),
        ('gpus = ["0000:41:20.0"]', '1: gpus: found "0000:41:20.0"; accepted: …'),
        ("[[gpus]]\na = 1", "1: gpus: found a table; accepted: …"),
        ('placement = "spred"', '1: placement: found "spred"; accepted: "least-damage" or …; did you mean "spread"?'),
        ('placement = "Binpack"', '1: placement: found "Binpack"; accepted: …; did you mean "binpack"?'),
        ('compute = ["most"]', '1: compute: found a list; accepted: "most" or "least"'),
        ('bare = "keep"', '1: bare: found "keep"; accepted: "destroy" or "quarantine"'),
        ('upsize = "yes"', '1: upsize: found "yes"; accepted: true or false'),
        ("mig_at_boot = 1", "1: mig_at_boot: found 1; accepted: true or false"),
        ('reserve = "1.5G"', '1: reserve: found "1.5G"; accepted: "0", or a memory size …; write 1536'),
        ("reserve = true", "1: reserve: found true; accepted: …"),
        ("reserve = -1", "1: reserve: found -1; accepted: …"),
        ("bare_grace = -0.5", "1: bare_grace: found -0.5; accepted: a number of seconds from 0 to 600"),
        ("bare_grace = 601", "1: bare_grace: found 601; accepted: a number of seconds from 0 to 600"),
        ("hardware_timeout = 0", "1: hardware_timeout: found 0; accepted: a number of seconds from 0.1 to 600"),
        ('lock_wait = "30s"', '1: lock_wait: found "30s"; accepted: a number of seconds from 0 to 600'),
        ("lock_wait = nan", "1: lock_wait: found nan; accepted: …"),
        ("in_use_wait = inf", "1: in_use_wait: found inf; accepted: a number of seconds from 0 to 60"),
        ("user_instances = -1", "1: user_instances: found -1; accepted: a whole number from 0 to 1000"),
        ("user_connections = 0", "1: user_connections: found 0; accepted: a whole number from 1 to 64"),
        ('user_memory = "much"', '1: user_memory: found "much"; accepted: …'),
        ("metrics_port = 65536", "1: metrics_port: found 65536; accepted: a whole number from 0 to 65535"),
        ('admission = "gate"', '1: admission: found "gate"; accepted: "count" or "gates"; did you mean "gates"?'),
        ("in_use_wait = true", "1: in_use_wait: found true; accepted: …"),
        ("lock_wait = 1979-05-27", "1: lock_wait: found 1979-05-27; accepted: …"),
        ('state_dir = ""', '1: state_dir: found ""; accepted: a folder, absolute or relative to that of this file'),
        ('simulator = "a\\u0000"', '1: simulator: found "a\\u0000"; accepted: a folder…'),
        ('profiles = ["1g.6gb"]', "1: profiles: found a list; accepted: a table, …"),
        ('[profiles]\n"NVIDIA A30" = []', '2: profiles."NVIDIA A30": found an empty list; …, at least one'),
        ('[profiles]\nA30 = "1g.6gb"', '2: profiles.A30: found "1g.6gb"; accepted: a list of profile names, …'),
        ('[profiles]\nA30 = ["MIG 1g.6gb"]', '2: profiles.A30: found "MIG 1g.6gb"; …; write "1g.6gb"'),
        ("[profiles]\nupsize = true", "2: profiles.upsize: found true; accepted: a list of profile names, …"),
        ("upsize = yes", '1: not TOML: Invalid value; write key = value, text in "quotes"'),
        ("\nupsize", "2: not TOML: …"),
        ("upsize = true\nupsize = false", "2: not TOML: Cannot overwrite a value"),
        ("gpus = [\n1,\n", "2: not TOML: …"),
        (f"reserve = {'9' * 5000}", "1: not TOML: a number has too many digits"),
        (f"gpus = {'[' * 30_000}", " not TOML: …"),
    ],
)
def test_a_mistake_is_answered_by_file_line_key_what_was_found_and_what_is_accepted(text: str, line: str) -> None:
    expected = ".*".join(re.escape(part) for part in f"{FILE}:{line}".split("…"))

    assert re.fullmatch(expected, refusal(text))


def test_the_mistake_nearest_to_the_top_is_named() -> None:
    assert f"{FILE}:2: upsize:" in refusal("\nupsize = 1\nplacement = 1\nbare = 1\n")


def test_in_a_list_over_several_lines_the_line_of_the_entry_is_named() -> None:
    text = f'# managed\ngpus = [\n    "{UUID}", # first\n\n    "GPU-2",\n]\n'

    assert refusal(text).startswith(f'{FILE}:5: gpus: found "GPU-2"')


comment = st.sampled_from(["", "# a comment", "# upsize = 1", "   ", "\t# [profiles]"])
statement = st.sampled_from(
    [
        'gpus = [\n  "41:00.0", # [\n  "42:00.0",\n]',
        'state_dir = """/srv\\\n  upsize = 1"""',
        "state_dir = '''\nplacement = 1'''",
        'placement = "spread"',
        "reserve = 1",
        '"bare" = "destroy" # upsize = 1',
    ]
)


@searching(deadline=None)
@given(st.lists(comment), st.lists(statement, unique_by=lambda s: s.split()[0]), st.lists(comment), st.booleans())
def test_the_line_named_is_that_of_the_key_whatever_stands_around_it(
    above: list[str], statements: list[str], below: list[str], windows: bool
) -> None:
    before = "".join(f"{part}\n" for part in [*above, *statements, *above])
    text = f"{before}upsize = 1\n" + "".join(f"{part}\n" for part in below) + '[profiles]\nA30 = ["1g.6gb"]\n'

    line = refusal(text.replace("\n", "\r\n") if windows else text)

    assert line.startswith(f"{FILE}:{before.count(chr(10)) + 1}: upsize: found 1;")


keys = st.sampled_from([*config_schema.KEYS, "gpu", "a.b", '"c d"', "profiles.A30", "node", "node.n1.upsize"])
values = st.sampled_from(
    [
        "1",
        "-1",
        "1e400",
        "true",
        '"*"',
        '"x"',
        '["x"]',
        "[1, 2]",
        "{}",
        "{a=1}",
        "[[]]",
        "[{b=[]}]",
        "1979-05-27",
        "nan",
    ]
)


@searching(deadline=None)
@given(
    st.one_of(
        st.text(), st.lists(st.builds("{}{} = {}".format, st.sampled_from(["", "[t]\n"]), keys, values)).map("\n".join)
    )
)
def test_any_text_is_settings_or_refused_in_one_line(text: str) -> None:
    try:
        answer = validated(text).config_path
    except ConfigError as error:
        answer = str(error)

    assert answer == FILE or re.fullmatch(rf"{FILE}(:\d+)?: .+", answer)


# Sections of nodes that share a machine

NODES = """
gpus = "*"
lock_wait = 10
[node.n1]
simulator = "n1"
[node.n2]
simulator = "n2"
lock_wait = 60
[node.n2.profiles]
A30 = ["1g.6gb"]
[node.n3]
gpus = []
state_dir = "/srv/n3"
run_dir = "n3/run"
"""


def test_a_section_takes_the_place_of_what_stands_above_and_leaves_the_rest() -> None:
    n1, n2, n3 = (validated(NODES, name) for name in ("n1", "n2", "n3"))

    assert (n1.lock_wait_s, n2.lock_wait_s, n3.lock_wait_s) == (10, 60, 10)
    assert (n1.allowed, n2.allowed) == ({}, {"A30": ("1g.6gb",)})
    assert (n1.managed, n2.managed, n3.managed) == (("*",), ("*",), ())


def test_each_section_has_records_and_locks_of_its_own() -> None:
    n1, n2, n3 = (validated(NODES, name) for name in ("n1", "n2", "n3"))

    assert (n1.simulator, n1.state_dir, n1.run_dir) == ("/etc/gres-mig/n1", "/etc/gres-mig/n1/state", n1.run_dir)
    assert (n2.simulator, n2.run_dir) == ("/etc/gres-mig/n2", "/etc/gres-mig/n2/run")
    assert (n3.simulator, n3.state_dir, n3.run_dir) == ("", "/srv/n3", "/etc/gres-mig/n3/run")


def test_a_file_without_sections_is_meant_for_every_name() -> None:
    assert validated("lock_wait = 7", "n1") == validated("lock_wait = 7", "")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("n4", "there is no [node.n4]; it is for the nodes n1, n2, n3"),
        ("N1", "there is no [node.N1]; it is for the nodes n1, n2, n3"),
        ("", "no node was named; it is for the nodes n1, n2, n3"),
    ],
)
def test_a_node_that_has_no_section_is_refused_in_one_line(name: str, line: str) -> None:
    assert refusal(NODES, name) == f"{FILE}: {line}"


@pytest.mark.parametrize("name", ["../n1", "n1/", "n 1", "n1\n", "é", "." * 3, "n" * 65])
def test_what_cannot_be_a_name_of_a_node_is_refused(machine: Path, name: str) -> None:
    written(machine / "etc" / "config.toml", NODES)

    with pytest.raises(ConfigError, match="is no name of a Slurm node"):
        config.load(name=name)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("node = 1", "1: node: found 1; accepted: a table for each node, [node.NAME], …"),
        ("[[node]]\na = 1", "1: node: found a list; accepted: a table for each node, …"),
        ("[node]\nn1 = 1", "2: node.n1: found 1; accepted: a table for each node, …"),
        ('[node."n 1"]\nupsize = true', '1: node."n 1": found the name "n 1"; accepted: …'),
        ('[node.n1]\nplacement = "x"', '2: node.n1.placement: found "x"; accepted: "least-damage" or …'),
        ('[node.n1.profiles]\nA30 = "x"', '2: node.n1.profiles.A30: found "x"; accepted: a list of …'),
        ("[node.n1]\nrundir = 1", "2: node.n1.rundir: found an unknown key; …; did you mean run_dir?"),
        ("[node.n1.node.n2]\na = 1", "1: node.n1.node: found an unknown key; …"),
        ('run_dir = "/run"', "1: run_dir: found an unknown key; …"),
        ('upsize = 1\n[node.n1]\nplacement = "x"', "1: upsize: found 1; …"),
        ("[node.n1]\n[node.n2]", "2: node.n2: found the state_dir of node n1; accepted: … of its own"),
        (
            '[node.n1]\nstate_dir = "1"\n[node.n2]\nstate_dir = "2"',
            "3: node.n2: found the run_dir of node n1; accepted: … of its own",
        ),
    ],
)
def test_a_mistake_in_a_section_is_answered_by_its_line_whichever_node_reads_it(text: str, line: str) -> None:
    expected = ".*".join(re.escape(part) for part in f"{FILE}:{line}".split("…"))

    assert re.fullmatch(expected, refusal(text, "n1"))
    assert refusal(text, "n1") == refusal(text, "n9")


def test_the_file_of_a_simulated_node_has_no_sections(node: Path) -> None:
    written(node / "config.toml", '[node.n1]\nstate_dir = "a"\n')

    with pytest.raises(ConfigError, match=r"config\.toml:1: node: found sections; accepted: none in the file of a sim"):
        config.load(node=node, name="n1")


def test_each_name_has_its_own_settings_kept(machine: Path) -> None:
    written(machine / "etc" / "config.toml", NODES)
    first = [config.load(name=name) for name in ("n1", "n2")]

    second = [config.load(name=name) for name in ("n1", "n2")]

    assert [settings.simulator.rpartition("/")[2] for settings in second] == ["n1", "n2"]
    assert second == first
    assert {entry.name for entry in (machine / "run").iterdir()} == {"config.n1.json", "config.n2.json"}


def test_what_was_kept_for_one_name_is_not_used_for_another(machine: Path) -> None:
    written(machine / "etc" / "config.toml", NODES)
    config.load(name="n1")
    (machine / "run" / "config.n1.json").rename(machine / "run" / "config.n2.json")

    assert config.load(name="n2").lock_wait_s == 60


# Whom a file is trusted from


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
def test_a_file_that_others_can_write_is_not_trusted(machine: Path, mode: int) -> None:
    file = written(machine / "etc" / "config.toml", 'gpus = "*"\n', mode)

    with pytest.raises(ConfigError, match=rf"{file} has mode {mode:04o}.*; run: chmod go-w {file}$"):
        config.load()


def test_a_file_in_a_folder_that_others_can_write_is_not_trusted(machine: Path) -> None:
    written(machine / "etc" / "config.toml", 'gpus = "*"\n')
    (machine / "etc").chmod(0o775)

    with pytest.raises(ConfigError, match=rf"run: chmod go-w {machine}/etc$"):
        config.load()


def test_in_a_sticky_folder_only_the_file_itself_counts(machine: Path) -> None:
    written(machine / "etc" / "config.toml", 'gpus = "*"\n')
    (machine / "etc").chmod(0o1777)

    assert config.load().managed == ("*",)


@as_root
def test_a_file_of_another_user_is_not_trusted(machine: Path) -> None:
    file = written(machine / "etc" / "config.toml", 'gpus = "*"\n')
    os.chown(file, 12345, 0)

    with pytest.raises(ConfigError, match=rf"belongs to uid 12345, not to root.*; run: chown root {file}$"):
        config.load()


@as_root
def test_a_user_runs_a_simulated_node_of_their_own() -> None:
    # Not below tmp_path, which another user cannot reach.
    with TemporaryDirectory() as folder:
        write_node_config(folder)
        for path in (folder, *(entry.path for entry in os.scandir(folder))):
            os.chown(path, 12345, 12345)

        with pytest.raises(ConfigError, match="belongs to uid 12345"):
            config.load(node=folder)
        os.seteuid(12345)
        try:
            assert config.load(node=folder).managed == ("*",)
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.toml"
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)

    with pytest.raises(ConfigError, match="not a regular file"):
        config.load(path)


def test_a_file_that_is_no_text_is_answered_by_the_line_of_its_first_odd_byte(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(b"upsize = true\n# caf\xe9\n")

    with pytest.raises(ConfigError, match=rf"{file}:2: byte 0xe9 is not UTF-8"):
        config.load(file)


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "config.toml", "#" * 100_000)

    with pytest.raises(ConfigError, match="larger than 64 KiB"):
        config.load(file)


# What is kept


def test_a_second_process_loads_neither_pydantic_nor_a_toml_parser(node: Path) -> None:
    code = (
        "import sys; from gres_mig import config; settings = config.load(node=sys.argv[1]);"
        "print(settings.managed, sorted({'pydantic', 'tomllib', 'tomli', 'hashlib'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(node)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    seen = [subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout for _ in range(2)]

    assert "pydantic" in seen[0]
    assert seen[1] == "('*',) []\n"


def test_what_is_kept_is_what_was_validated(machine: Path) -> None:
    file = machine / "etc" / "config.toml"
    written(file, f'gpus = ["{UUID}", "41:00.0"]\nlock_wait = 7\n[profiles]\n"NVIDIA A30" = ["1g.6gb", "2g.12gb"]\n')

    first, second = config.load(), config.load()

    assert first == second
    assert second.allowed == {"NVIDIA A30": ("1g.6gb", "2g.12gb")}
    assert [entry.name for entry in (machine / "run").iterdir()] == ["config.json"]


@pytest.fixture
def planted(node: Path) -> Path:
    """What a node has kept, changed so that a use of it shows: `upsize` is true in it, false in the file."""
    config.load(node=node)
    file = node / "run" / "config.json"
    kept = json.loads(file.read_text())
    kept["settings"]["upsize"] = True
    written(file, json.dumps(kept))
    return file


def test_what_was_kept_is_used(planted: Path, node: Path) -> None:
    assert config.load(node=node).upsize


@pytest.mark.parametrize("change", ["# another text", "upsize = false"])
def test_a_change_of_the_file_is_in_force_at_once(planted: Path, node: Path, change: str) -> None:
    file = node / "config.toml"
    written(file, f"{change}\n{file.read_text()}")

    assert not config.load(node=node).upsize
    assert not json.loads(planted.read_text())["settings"]["upsize"]


def test_another_version_validates_again(planted: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "__version__", "0.0.0")

    assert not config.load(node=node).upsize


def test_another_file_of_the_same_text_is_validated_for_itself(machine: Path) -> None:
    one = written(machine / "etc" / "one.toml", 'state_dir = "records"\n')
    (machine / "other").mkdir(mode=0o755)
    other = written(machine / "other" / "one.toml", 'state_dir = "records"\n')

    assert config.load(one).state_dir == str(machine / "etc" / "records")
    assert config.load(other).state_dir == str(machine / "other" / "records")


@pytest.mark.parametrize("mode", [0o666, 0o664])
def test_what_others_can_have_kept_is_not_used(planted: Path, node: Path, mode: int) -> None:
    planted.chmod(mode)

    assert not config.load(node=node).upsize


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_what_was_kept_where_others_can_write_is_neither_used_nor_replaced(
    planted: Path, node: Path, mode: int
) -> None:
    (node / "run").chmod(mode)
    before = planted.read_text()

    assert not config.load(node=node).upsize
    assert planted.read_text() == before


@as_root
def test_what_another_user_kept_is_not_used(planted: Path, node: Path) -> None:
    os.chown(planted, 12345, 12345)

    assert not config.load(node=node).upsize


def test_what_was_kept_through_a_link_is_not_used(planted: Path, node: Path) -> None:
    elsewhere = planted.rename(node / "elsewhere.json")
    planted.symlink_to(elsewhere)

    assert not config.load(node=node).upsize


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"key": 1}', "\0"])
def test_what_was_kept_and_is_damaged_is_replaced(planted: Path, node: Path, content: str) -> None:
    written(planted, content)

    assert not config.load(node=node).upsize
    assert json.loads(planted.read_text())["settings"]["managed"] == ["*"]


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_what_a_version_with_other_settings_kept_is_not_used(planted: Path, node: Path, change: str) -> None:
    kept = json.loads(planted.read_text())
    if change == "missing":
        del kept["settings"]["young_s"]
    else:
        kept["settings"]["colour"] = "red"
    written(planted, json.dumps(kept))

    assert not config.load(node=node).upsize


def test_a_file_that_only_root_may_read_is_kept_so(machine: Path) -> None:
    written(machine / "etc" / "config.toml", 'gpus = "*"\n', 0o600)

    config.load()

    assert (machine / "run" / "config.json").stat().st_mode & 0o777 == 0o600


def test_a_machine_on_which_nothing_can_be_kept_works_all_the_same(machine: Path) -> None:
    written(machine / "etc" / "config.toml", 'gpus = "*"\n')
    (machine / "run").rmdir()

    assert [config.load().managed for _ in range(2)] == [("*",), ("*",)]
    assert not (machine / "run").exists()


# What is written for an admin

uuids = st.uuids().map("GPU-{}".format)
addresses = st.builds(
    "{:08x}:{:02x}:{:02x}.0".format, st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 31)
)
models = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
profile_names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
seconds = st.floats(0.1, 60)
settings_of_a_node = st.builds(
    Settings,
    st.one_of(st.just(DEFAULTS.state_dir), st.just("/srv/with space")),
    st.just(DEFAULTS.run_dir),
    st.just(FILE),
    managed=st.one_of(st.just(("*",)), st.lists(st.one_of(uuids, addresses), unique=True).map(tuple)),
    allowed=st.dictionaries(models, st.lists(profile_names, min_size=1, unique=True).map(tuple), max_size=3),
    placement=st.sampled_from(["least-damage", "spread", "binpack"]),
    compute=st.sampled_from(["most", "least"]),
    upsize=st.booleans(),
    reserve_mib=st.integers(0, 2**31),
    mig_at_boot=st.booleans(),
    bare=st.sampled_from(["destroy", "quarantine"]),
    bare_grace_s=seconds,
    hardware_timeout_s=seconds,
    lock_wait_s=seconds,
    in_use_wait_s=seconds,
    admission=st.sampled_from(["count", "gates"]),
    serving=st.builds(Serving, memory_mib=st.sampled_from([0, 49152]), connections=st.integers(1, 64)),
)


@searching(deadline=None)
@given(settings_of_a_node, st.lists(st.builds(gpu, uuids, st.integers(0, 63), addresses, models), max_size=3))
def test_what_is_written_means_what_was_asked_for(settings: Settings, gpus: list[Gpu]) -> None:
    meant = validated(render(settings, gpus))

    assert set(meant.managed) == set(settings.managed)
    assert replace(meant, managed=()) == replace(settings, managed=())


def test_every_gpu_of_the_node_is_shown_and_only_the_managed_ones_are_named() -> None:
    gpus = [gpu(), gpu(OTHER, 1, "00000000:42:00.0", "NVIDIA L40")]

    lines = render(replace(DEFAULTS, managed=(UUID,)), gpus).splitlines()

    assert f'    "{UUID}",  # GPU 0, NVIDIA A30' in lines
    assert f'    # "{OTHER}",  # GPU 1, NVIDIA L40' in lines


def test_the_plain_profiles_of_each_model_are_there_to_choose_from() -> None:
    assert '# "NVIDIA A30" = ["1g.6gb"]' in render(DEFAULTS, [gpu()]).splitlines()


def test_every_key_is_in_the_written_file() -> None:
    text = render(replace(DEFAULTS, simulator="/srv/simulated"))

    assert set(config_schema.KEYS) == set(re.findall(r"^(?:# )?\[?(\w+)(?:\]| = )", text, re.MULTILINE))


def test_a_written_file_is_readable_to_all_and_writable_to_its_owner(machine: Path) -> None:
    old = os.umask(0)
    try:
        write(replace(config.defaults(), managed=(UUID,)))
    finally:
        os.umask(old)

    file = machine / "etc" / "config.toml"
    assert file.stat().st_mode & 0o777 == 0o644
    assert list((machine / "etc").iterdir()) == [file]
    assert config.load().managed == (UUID,)


def test_what_cannot_be_written_is_answered_by_why(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("")

    with pytest.raises(ConfigError, match=f"writing {tmp_path}/etc/config.toml: "):
        write(config.defaults(tmp_path / "etc" / "config.toml"))


# What the manual says


def manual() -> str:
    return (ROOT / "docs" / "config.md").read_text()


def test_every_example_of_the_manual_is_accepted() -> None:
    examples = re.findall(r"^```toml\n(.*?)^```", manual(), re.MULTILINE | re.DOTALL)

    assert len(examples) == 4
    assert [validated(e, "n2" if "[node.n2]" in e else "") != DEFAULTS for e in examples] == [True] * 4


def test_the_manual_has_every_key_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `\[?(\w+)\]?` \| (.*?) \|", manual(), re.MULTILINE))
    stated = "".join(
        f"{key} = {default.strip('`')}\n" for key, default in rows.items() if key not in {"simulator", "profiles"}
    )

    assert tuple(rows) == config_schema.KEYS
    assert validated(stated) == DEFAULTS


def test_the_mistake_in_the_manual_is_answered_as_it_says() -> None:
    assert refusal('\n\nplacement = "spred"\n') in manual()
