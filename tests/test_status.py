"""`gres-mig status`: what it draws, for whom, and what `--check` calls drift."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gres_mig import config_text, machine, simulator
from gres_mig.allocator import Allocator
from gres_mig.models import Allocation, Intent, Owner, Placement, Record, Request, Settings
from gres_mig.settle import as_release
from gres_mig.show import age
from gres_mig.state import Store
from gres_mig.values import replace
from gres_mig.view import View, holdings
from tests.commands import nobody, run

ALICE, BOB = Owner("manual:alice"), Owner("slurm:alpha:4711")
KERNEL = Owner("jupyter:1000:3f2b9c1e-8a4d-4c6e-9b1a-0123456789ab", 1000)
ROOT = Path(__file__).parent.parent


@pytest.fixture
def settings(node: simulator.Node) -> Settings:
    """The node's settings, in its config.toml as well: all GPUs managed, a busy instance is stuck at once."""
    settings = replace(config_text.write_node_config(node.store.folder), in_use_wait_s=0.0)
    config_text.write(settings)
    return settings


@pytest.fixture
def store(settings: Settings) -> Store:
    return Store(settings, machine.boot_id(settings.simulator))


def bar(text: str, gpu: int) -> str:
    """The bar of that GPU."""
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(f"GPU {gpu} "))
    return next(line for line in lines[at:] if line.lstrip().startswith("│"))


@contextmanager
def on_a_terminal(
    node: simulator.Node, *arguments: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[Callable[[str], bool]], str]]]:
    """The command on a terminal of its own, and a function that reads there until its text is enough, or it ends."""
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "gres_mig", "--node", node.store.folder, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=its, env={**os.environ, "TERM": "xterm", **environment})
    os.close(its)

    def read(enough: Callable[[str], bool]) -> str:
        text = ""
        while not enough(text):
            try:
                data = os.read(ours, 65536)
            except OSError:
                # What a terminal says when nobody is left at its other end.
                break
            text += data.decode()
        return text

    try:
        yield process, read
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def put(store: Store, record: Record) -> None:
    with store.transaction() as node:
        node.save(node.state.put(record))


def intent_of(allocation: Allocation, since: float) -> Intent:
    shared = {name: getattr(allocation, name) for name in Record.field_names()}
    place = {"nonce": "0123", "owner": BOB, "placement": Placement(6, 3), "since": since}
    return Intent(**{**shared, **place}, maker=machine.this_process())


def test_a_free_node_shows_each_gpu_as_a_bar_and_the_largest_that_fits(
    node: simulator.Node, settings: Settings
) -> None:
    ran = run(node, "status")

    assert ran.code == 0
    assert ran.out.splitlines()[0] == "2 GPUs: 24 of 24 memory slices free"
    assert f"GPU 1  {node.uuids[1]}" in ran.out
    assert bar(ran.out, 0).count("┊") == 11
    assert ran.out.count("free  12 of 12 slices: up to 4g.96gb, 97,280 MiB") == 2


def test_each_holder_has_a_line_with_place_profile_memory_and_owner(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocator.allocate(ALICE, Request(8000))
    allocator.allocate(BOB, Request(30000))

    ran = run(node, "status")

    assert ran.out.splitlines()[0] == "2 GPUs: 15 of 24 memory slices free; 2 allocations"
    assert re.search(r"^    0:3  1g\.24gb   24,192 MiB  \ds  manual:alice$", ran.out, re.MULTILINE)
    assert re.search(r"^    6:6  2g\.48gb   48,512 MiB  \ds  slurm:alpha:4711 for 30,000 MiB$", ran.out, re.MULTILINE)


def test_a_segment_is_as_wide_as_its_slices(node: simulator.Node, allocator: Allocator, settings: Settings) -> None:
    allocator.allocate(ALICE, Request(8000))
    allocator.allocate(BOB, Request(30000))

    drawn = bar(run(node, "status").out, 0).strip()

    cell = (len(drawn) - 1) // 12
    assert [n for n in range(13) if drawn[n * cell] == "│"] == [0, 3, 6, 12]
    assert drawn.count("│") == 4
    assert drawn[1:8] == "1g.24gb"
    assert drawn[6 * cell + 1 :].startswith("2g.48gb ")


def test_slices_in_which_no_profile_has_a_place_are_not_called_usable(
    memory: Path, node: simulator.Node, settings: Settings
) -> None:
    folder = memory / "h200"
    simulator.create(folder, [("h200", 1)])
    other = simulator.Node(folder)
    config_text.write_node_config(folder)
    for start in range(7):
        other.make(0, "1g.18gb", start)

    ran = run(other, "status")

    assert "free  1 of 8 slices: no profile fits" in ran.out


def test_a_foreign_instance_is_named_so_that_it_can_be_adopted(node: simulator.Node, settings: Settings) -> None:
    made = node.make(1, "1g.24gb", 9)
    bare = node.make(1, "2g.48gb", 0, bare=True)

    ran = run(node, "status")

    assert ran.out.splitlines()[0].endswith("; 2 foreign")
    assert f"foreign: GPU instance {made.id}\n" in ran.out
    assert f"foreign: GPU instance {bare.id}, bare\n" in ran.out
    assert "foreign" in bar(ran.out, 1)


def test_a_stuck_instance_shows_who_holds_it(node: simulator.Node, allocator: Allocator, settings: Settings) -> None:
    allocation = allocator.allocate(ALICE, Request(8000)).allocation
    node.hold(0, allocation.gi_id, 0)
    run(node, "reclaim", "manual:alice")

    ran = run(node, "status")

    assert "stuck: manual:alice" in ran.out
    assert re.search(r"^         stuck for \d+s, 1 try, next (in \d+s|is due)$", ran.out, re.MULTILINE)
    assert f"         {machine.describe(os.getpid())}\n" in ran.out


def test_a_lost_allocation_is_shown_before_anybody_has_recorded_it_lost(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocation = allocator.allocate(ALICE, Request(8000)).allocation
    node.destroy(0, allocation.gi_id)

    ran = run(node, "status")

    assert "lost: manual:alice" in ran.out


def test_a_fenced_gpu_says_why_and_how_to_unfence_it_and_shows_who_is_on_it(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocator.allocate(ALICE, Request(8000))
    allocator.fence(node.uuids[0], "a driver call did not return")

    ran = run(node, "status")

    assert ran.out.splitlines()[0] == "2 GPUs: 12 of 24 memory slices free; 1 allocation, 1 fenced"
    assert re.search(r"^  fenced for \ds: a driver call did not return$", ran.out, re.MULTILINE)
    assert f"  run: gres-mig unfence {node.uuids[0]}\n" in ran.out
    assert bar(ran.out, 0).startswith("  │1g.24gb ═")
    assert "×" in bar(ran.out, 0)


@pytest.mark.parametrize("boards", [[("a100-40", 1), ("l40", 1), ("a30", 1)]])
def test_a_gpu_that_is_not_managed_is_one_line(node: simulator.Node) -> None:
    config_text.write_node_config(node.store.folder, (node.uuids[0],))
    node.make(2, "1g.6gb")

    ran = run(node, "status")

    assert ran.out.splitlines()[0] == "3 GPUs, 1 managed: 8 of 8 memory slices free"
    assert "not managed: this board has no MIG" in ran.out
    assert "not managed: MIG mode is on, 1 instance(s)" in ran.out
    assert ran.out.count("│\n") == 1


def test_a_gpu_in_trouble_says_what_is_wrong(node: simulator.Node, settings: Settings) -> None:
    node.set_mig(0, False)
    node.set_mig(1, True, pending=False)

    ran = run(node, "status")

    assert ran.code == 0
    assert ran.out.splitlines()[0] == "2 GPUs: 0 of 24 memory slices free"
    assert "  MIG mode is off\n" in ran.out
    assert "  a change of MIG mode to off is pending\n" in ran.out


def test_a_lost_gpu_hides_no_other(node: simulator.Node, settings: Settings) -> None:
    node.lose(0)

    ran = run(node, "status")

    assert ran.code == 0
    assert "GPU is lost" in ran.out
    assert "free  12 of 12 slices" in ran.out


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("boards", [[("rtx-pro-6000", 16)]])
def test_no_line_is_wider_than_the_terminal(
    node: simulator.Node, allocator: Allocator, settings: Settings, columns: int
) -> None:
    for number in range(20):
        allocator.allocate(Owner(f"slurm:alpha:{4711 + number}"), Request(8000))
    node.make(15, "4g.96gb", 0, bare=True)

    ran = run(node, "status", columns=columns)

    # A title is a GPU's index and UUID, which is never cut.
    wide = [line for line in ran.out.splitlines() if len(line) > columns and not line.startswith("GPU")]
    assert not wide
    assert ran.out.count("│\n") == 16


def test_a_bar_fits_a_terminal_of_half_the_usual_width(node: simulator.Node, settings: Settings) -> None:
    node.make(0, "1g.24gb", 0)

    ran = run(node, "status", columns=40)

    assert 30 < len(bar(ran.out, 0)) <= 40


def test_on_a_narrow_terminal_the_memory_goes_before_a_letter_of_an_owner(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocator.allocate(KERNEL, Request(8000))

    narrow, wide = run(node, "status", columns=80), run(node, "status", columns=120)

    assert f"  {KERNEL}\n" in narrow.out
    assert "24,192 MiB" not in narrow.out
    assert f"24,192 MiB  0s  {KERNEL}" in wide.out.replace("1s", "0s")


@pytest.mark.parametrize("code", [9, 12])
def test_a_node_without_driver_has_no_gpus_and_no_fault(node: simulator.Node, settings: Settings, code: int) -> None:
    node.plant("nvmlInitWithFlags", "returns", code=code, times=0)

    ran = run(node, "status")

    assert ran.code == 0
    assert ran.out.splitlines()[0] == "0 GPUs"
    assert "the NVIDIA driver, then see: gres-mig doctor" in ran.out.replace("\n", " ")


def test_a_driver_that_does_not_fit_its_library_is_the_nodes_fault(node: simulator.Node, settings: Settings) -> None:
    node.upgrade_library()

    ran = run(node, "status")

    assert ran.code == 4
    assert "reboot the node" in ran.err


def test_others_see_what_is_in_use_but_not_whose_it_is(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocator.allocate(ALICE, Request(8000))
    node.make(1, "1g.24gb", 9)
    run(node, "status")
    with nobody(node, settings):
        ran = run(node, "status")

    assert ran.code == 0
    assert re.search(r"instances as root last saw them: \d+s ago; owners are shown to root only", ran.out)
    assert re.search(r"^    0:3  1g\.24gb   24,192 MiB  \d+s  in use$", ran.out, re.MULTILINE)
    assert "foreign: GPU instance" in ran.out
    assert "alice" not in ran.out


def test_others_are_told_when_nothing_was_published_yet(node: simulator.Node, settings: Settings) -> None:
    with nobody(node, settings):
        ran = run(node, "status")

    assert ran.code == 0
    assert "run as root: gres-mig status" in ran.out.replace("\n", " ")


def test_others_see_a_gpu_that_was_lost_since_root_looked(node: simulator.Node, settings: Settings) -> None:
    run(node, "status")
    node.lose(0, identity=True)
    with nobody(node, settings):
        ran = run(node, "status")

    assert "GPU is lost" in ran.out


def test_a_damaged_publication_is_said_and_hides_no_gpu(node: simulator.Node, settings: Settings) -> None:
    run(node, "status")
    public = Path(settings.run_dir, "public.json")
    public.write_text(json.dumps({**json.loads(public.read_text()), "gpus": [{"uuid": 1}]}))
    with nobody(node, settings):
        ran = run(node, "status")

    assert ran.code == 0
    assert "cannot be read" in ran.out
    assert node.uuids[1] in ran.out


def test_what_is_made_while_root_looks_is_neither_lost_nor_foreign(
    node: simulator.Node, allocator: Allocator, settings: Settings, store: Store
) -> None:
    without, before = allocator.look(), store.read()
    allocator.allocate(ALICE, Request(8000))
    with_it, after = allocator.look(), store.read()

    committed_after_the_look = View(without, after, before, time.time())
    made_before_its_record_was_read = View(with_it, before, after, time.time())

    assert [h.kind for h in holdings(committed_after_the_look, without[0])] == ["allocation"]
    assert holdings(made_before_its_record_was_read, with_it[0]) == ()
    assert [h.kind for h in holdings(View(without, after, after, time.time()), without[0])] == ["lost"]
    assert [h.kind for h in holdings(View(with_it, before, before, time.time()), with_it[0])] == ["foreign"]


def test_looking_changes_no_record(
    node: simulator.Node, allocator: Allocator, settings: Settings, store: Store
) -> None:
    allocator.allocate(ALICE, Request(8000))
    node.configure(log="mutating")
    before = store.read().records

    run(node, "status", "--check")

    assert store.read().records == before
    assert node.calls() == []


def test_check_of_an_undisturbed_node_finds_no_drift(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocator.allocate(ALICE, Request(8000))

    ran = run(node, "status", "--check")

    assert ran.code == 0
    assert ran.out.splitlines()[-1] == "records and hardware agree"


def test_a_foreign_instance_alone_is_no_drift(node: simulator.Node, settings: Settings) -> None:
    node.make(0, "1g.24gb", 0)

    ran = run(node, "status", "--check")

    assert ran.code == 0
    assert "foreign: GPU instance" in ran.out


def test_a_record_without_instance_is_drift(node: simulator.Node, allocator: Allocator, settings: Settings) -> None:
    node.destroy(0, allocator.allocate(ALICE, Request(8000)).allocation.gi_id)

    ran = run(node, "status", "--check")

    assert ran.code == 4
    assert "missing: manual:alice, 1g.24gb at 0:3" in ran.out


def test_another_instance_in_the_place_of_a_recorded_one_is_drift(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    node.destroy(0, allocator.allocate(ALICE, Request(8000)).allocation.gi_id)
    other = node.make(0, "2g.48gb", 0)

    ran = run(node, "status", "--check", "--json")

    assert ran.code == 4
    (drift,) = ran.plain["drift"]
    assert drift["kind"] == "mismatch"
    assert f"GPU instance {other.id} at 0:6" in drift["text"]


def test_where_two_claim_a_slice_the_bar_shows_what_is_there_and_both_have_a_line(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    node.destroy(0, allocator.allocate(ALICE, Request(8000)).allocation.gi_id)
    node.make(0, "2g.48gb", 0)

    ran = run(node, "status")

    assert bar(ran.out, 0).startswith("  │foreign 2g.48gb //")
    assert "lost: manual:alice" in ran.out


def test_a_stuck_record_is_drift(node: simulator.Node, allocator: Allocator, settings: Settings) -> None:
    allocation = allocator.allocate(ALICE, Request(8000)).allocation
    node.hold(0, allocation.gi_id, 0)
    run(node, "reclaim", "manual:alice")

    ran = run(node, "status", "--check", "--json")

    assert ran.code == 4
    assert [each["kind"] for each in ran.plain["drift"]] == ["stuck"]


def test_a_record_on_a_gpu_that_cannot_be_read_is_drift(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocator.allocate(ALICE, Request(8000))
    node.lose(0, identity=True)

    ran = run(node, "status", "--check", "--json")

    assert ran.code == 4
    assert [each["kind"] for each in ran.plain["drift"]] == ["unread"]


@pytest.mark.parametrize(("old_s", "code"), [(5.0, 0), (31.0, 4)])
def test_an_intent_is_drift_once_it_is_older_than_half_a_minute(
    node: simulator.Node, allocator: Allocator, settings: Settings, store: Store, old_s: float, code: int
) -> None:
    allocation = allocator.allocate(ALICE, Request(8000)).allocation
    put(store, intent_of(allocation, time.time() - old_s))

    assert run(node, "status", "--check").code == code


def test_a_release_that_somebody_is_at_work_on_is_no_drift_however_old_its_allocation(
    node: simulator.Node, allocator: Allocator, settings: Settings, store: Store
) -> None:
    allocation = allocator.allocate(ALICE, Request(8000)).allocation
    put(store, as_release(replace(allocation, since=time.time() - 3600)))
    with open(os.path.join(settings.run_dir, f"gpu-{node.uuids[0]}.lock"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        at_work = run(node, "status", "--check")
    left = run(node, "status", "--check", "--json")

    assert at_work.code == 0
    assert left.code == 4
    assert [each["kind"] for each in left.plain["drift"]] == ["old release"]


def test_a_release_whose_owner_just_ended_is_no_drift(
    node: simulator.Node, allocator: Allocator, settings: Settings, store: Store
) -> None:
    allocation = allocator.allocate(ALICE, Request(8000)).allocation
    with store.transaction() as transaction:
        state = transaction.state.buried(ALICE, machine.now_ns())
        transaction.save(state.put(as_release(replace(allocation, since=time.time() - 3600))))

    assert run(node, "status", "--check").code == 0


def test_instances_left_by_damaged_records_are_drift(
    node: simulator.Node, allocator: Allocator, settings: Settings, store: Store
) -> None:
    allocator.allocate(ALICE, Request(8000))
    Path(settings.state_dir, "state.json").write_bytes(b"{")
    with store.transaction():
        pass

    ran = run(node, "status", "--check", "--json")

    assert ran.code == 4
    assert [each["kind"] for each in ran.plain["drift"]] == ["distrusted"]
    assert ran.plain["gpus"][0]["holdings"][0]["state"] == "foreign"


def test_damaged_records_leave_what_they_named_in_its_place(
    node: simulator.Node, allocator: Allocator, settings: Settings
) -> None:
    allocator.allocate(ALICE, Request(8000))
    Path(settings.state_dir, "state.json").write_bytes(b"{")

    ran = run(node, "status")

    assert ran.code == 0
    assert "records were damaged" in ran.out
    assert "foreign: GPU instance" in ran.out


def test_check_is_refused_to_whom_the_records_are_not_readable(node: simulator.Node, settings: Settings) -> None:
    run(node, "status")
    with nobody(node, settings):
        ran = run(node, "status", "--check")

    assert ran.code == 2
    assert "run it as root" in ran.err


def test_json_has_every_gpu_and_what_holds_it(node: simulator.Node, allocator: Allocator, settings: Settings) -> None:
    allocation = allocator.allocate(ALICE, Request(8000)).allocation

    found = run(node, "status", "--json").plain

    first, second = found["gpus"]
    assert (first["slices"], first["free_slices"], first["managed"]) == (12, 9, True)
    assert first["largest_free"] == {"id": 5, "name": "2g.48gb", "memory_mib": 48512}
    assert first["holdings"] == [
        {
            "state": "allocation",
            "placement": {"start": 0, "size": 3},
            "profile": {"name": "1g.24gb", "memory_mib": 24192},
            "isolation": "env",
            "owner": "manual:alice",
            "requested": "8,000 MiB",
            "since": allocation.since,
            "gi_id": allocation.gi_id,
            "mig_uuid": allocation.mig_uuid,
            "stuck": None,
        }
    ]
    assert second["holdings"] == []


def test_every_field_of_the_json_is_documented(node: simulator.Node, allocator: Allocator, settings: Settings) -> None:
    allocation = allocator.allocate(ALICE, Request(8000)).allocation
    node.hold(0, allocation.gi_id, 0)
    run(node, "reclaim", "manual:alice")
    documented = (ROOT / "docs/json.md").read_text(encoding="utf-8")

    found = run(node, "status", "--check", "--json").plain

    assert not {name for name in names(found) if f"`{name}`" not in documented}


def names(value: object) -> set[str]:
    """All keys of all objects in it."""
    if isinstance(value, dict):
        return set(value).union(*map(names, value.values()))
    return set().union(*map(names, value)) if isinstance(value, list) else set()


def test_status_of_a_known_configuration_loads_no_pydantic(node: simulator.Node, settings: Settings) -> None:
    run(node, "status")
    script = (
        "import sys\n"
        "from gres_mig.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    assert 'pydantic' not in sys.modules"
    )
    command = [sys.executable, "-c", script, "--node", node.store.folder, "status"]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(("no_color", "painted"), [("", True), ("1", False)])
def test_a_terminal_gets_colour_unless_no_color_asks_for_none(
    node: simulator.Node, settings: Settings, no_color: str, painted: bool
) -> None:
    with on_a_terminal(node, "status", NO_COLOR=no_color) as (process, read):
        shown = read(lambda text: False)
        code = process.wait()

    assert code == 0
    assert ("\x1b[" in shown) is painted


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_watch_redraws_until_interrupted_and_gives_the_terminal_back(
    node: simulator.Node, settings: Settings, number: signal.Signals, code: int
) -> None:
    with on_a_terminal(node, "status", "--watch") as (process, read):
        shown = read(lambda text: text.count("2 GPUs") == 2)
        process.send_signal(number)
        shown += read(lambda text: False)
        ended = process.wait()

    assert ended == code
    assert shown.startswith("\x1b[?1049h")
    assert shown.endswith("\x1b[?1049l")
    assert "Traceback" not in shown


def test_watch_shows_no_more_than_the_terminal_is_high(node: simulator.Node, settings: Settings) -> None:
    with on_a_terminal(node, "status", "--watch", LINES="6", COLUMNS="80") as (process, read):
        shown = read(lambda text: "more lines" in text)
        process.send_signal(signal.SIGINT)
        process.wait()

    assert shown.count("\n") <= 5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (59.9, "59s"), (60, "1m"), (3599, "59m"), (3600, "1h"), (8040, "2h 14m"), (273600, "3d 4h")],
)
def test_ages_have_two_units_at_most(seconds: float, text: str) -> None:
    assert age(seconds) == text
