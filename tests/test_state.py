"""The record file and its locks: damaged, of another version, on a full or failing disk."""

from __future__ import annotations

import errno
import json
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from failing_files import Files
from forked import each
from paths import OWNER, Small, Told
from recorded import CAROL, FULL, record, sealed

from gres_mig import log, machine
from gres_mig.allocator import Allocator
from gres_mig.errors import GresMigError, NoCapacity, NodeFault, StateError
from gres_mig.models import Allocation, Fence, Intent, Owner, Process, Request, Settings, State, Tombstone
from gres_mig.records import decode, encode
from gres_mig.simulator.admin import Node
from gres_mig.state import Store
from gres_mig.values import replace

ALICE, BOB = Owner("manual:alice"), Owner("manual:bob")
ONE_SLICE = Request(5_000)


@pytest.fixture(autouse=True)
def quiet() -> None:
    log.send_to(lambda level, line: None)


@pytest.fixture
def boards() -> list[tuple[str, int]]:
    return [("a30", 2)]


@pytest.fixture
def store(settings: Settings) -> Store:
    return Store(settings, machine.boot_id(settings.simulator))


@pytest.fixture
def file(settings: Settings) -> Path:
    return Path(settings.state_dir, "state.json")


def damaged(settings: Settings) -> list[bytes]:
    """What was set aside so far."""
    return [path.read_bytes() for path in sorted(Path(settings.state_dir).glob("state.json.damaged-*"))]


def mutating(node: Node) -> list[str]:
    return [call["function"] for call in node.calls() if call["mutating"]]


def refusal(ask: Callable[[], object]) -> GresMigError:
    with pytest.raises(GresMigError) as caught:
        ask()
    return caught.value


OPERATIONS: dict[str, Callable[[Allocator, Node], object]] = {
    "allocate": lambda allocator, node: allocator.allocate(BOB, ONE_SLICE),
    "reclaim": lambda allocator, node: allocator.reclaim(ALICE),
    "adopt": lambda allocator, node: allocator.adopt(BOB, node.uuids[0], node.instances()[0].id),
    "reconcile": lambda allocator, node: allocator.reconcile(now=True),
    "status": lambda allocator, node: allocator.look(everything=True),
}


def test_a_file_cut_off_anywhere_is_kept_and_not_trusted(store: Store, settings: Settings, file: Path) -> None:
    with store.transaction():
        whole = encode(FULL)
    for length in range(len(whole)):
        file.write_bytes(whole[:length])

        with store.transaction() as node:
            assert (node.state.records, node.state.distrusted) == ((), True)
        assert damaged(settings) == [whole[:length]]
        for path in Path(settings.state_dir).glob("*.damaged-*"):
            path.unlink()


def test_what_a_newer_version_wrote_is_kept_through_all_changes(allocator: Allocator, file: Path) -> None:
    allocator.allocate(ALICE, ONE_SLICE)
    plain = json.loads(file.read_bytes())
    plain["colour"] = {"of": "the node"}
    plain["records"][0] |= {"mood": ["good"]}
    plain["records"][0]["owner"] |= {"badge": 7}
    file.write_bytes(sealed(plain))

    allocator.allocate(BOB, ONE_SLICE)
    allocator.allocate(ALICE, ONE_SLICE)

    plain = json.loads(file.read_bytes())
    assert plain["colour"] == {"of": "the node"}
    assert [r.get("mood") for r in plain["records"] if r["owner"]["name"] == "manual:alice"] == [["good"]]
    assert [r["kind"] for r in plain["records"]] == ["allocation"] * 2


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_file_of_a_newer_format_is_refused_and_not_written(
    allocator: Allocator, node: Node, file: Path, operation: str
) -> None:
    allocator.allocate(ALICE, ONE_SLICE)
    newer = sealed({**json.loads(file.read_bytes()), "format": 2})
    file.write_bytes(newer)
    node.configure(log="mutating")

    error = refusal(lambda: OPERATIONS[operation](allocator, node))

    assert (error.fault.exit_code, error.code) == (4, "STATE")
    assert "upgrade gres-mig" in str(error)
    assert file.read_bytes() == newer
    assert sorted(path.name for path in file.parent.iterdir()) == ["spare", "state.json"]
    assert mutating(node) == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_damage_destroys_nothing_and_stops_nothing(
    allocator: Allocator, node: Node, settings: Settings, file: Path, operation: str
) -> None:
    allocator.allocate(ALICE, ONE_SLICE)
    allocator.allocate(CAROL, ONE_SLICE)
    before, bad = node.instances(), file.read_bytes()[:-9]
    file.write_bytes(bad)
    node.configure(log="mutating")

    OPERATIONS[operation](allocator, node)

    assert damaged(settings) == [bad]
    assert [function for function in mutating(node) if "Destroy" in function] == []
    assert [i for i in node.instances() if i in before] == before


def test_a_crash_while_it_is_set_aside_leaves_a_damaged_file_and_not_none(settings: Settings, file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"{")

    def work(nth: int) -> bool:
        files = Files(settings.state_dir, nth=nth, code=errno.EIO)
        try:
            Store(settings, "boot").read()
        except StateError:
            return files.count >= nth
        return False

    nth = 1
    while each(work, [nth])[0]:
        nth += 1

        assert file.read_bytes() == b"{" or decode(file.read_bytes()).distrusted
        file.write_bytes(b"{")
    assert nth > 5


def test_after_damage_only_gpus_that_hold_unrecorded_instances_take_no_new_work(
    allocator: Allocator, node: Node, file: Path
) -> None:
    allocator.allocate(ALICE, ONE_SLICE)
    (lost,) = node.instances()
    file.write_bytes(b"")

    elsewhere = allocator.allocate(BOB, ONE_SLICE).allocation
    there = refusal(lambda: allocator.allocate(CAROL, Request(5_000, gpus=(lost.gpu_uuid,))))

    assert elsewhere.gpu_uuid != lost.gpu_uuid
    assert isinstance(there, NoCapacity)
    assert f"gres-mig adopt OWNER {lost.gpu_uuid}:{lost.id}" in str(there)


@pytest.mark.parametrize("boards", [[("a30", 1)]])
@pytest.mark.parametrize("way", ["adopt", "reclaim"])
def test_who_is_adopted_or_reclaimed_after_damage_is_in_the_way_no_more(
    allocator: Allocator, store: Store, node: Node, file: Path, way: str
) -> None:
    allocator.allocate(ALICE, ONE_SLICE)
    (lost,) = node.instances()
    file.write_bytes(b"")
    closed = refusal(lambda: allocator.allocate(BOB, ONE_SLICE))

    if way == "adopt":
        allocator.adopt(ALICE, lost.gpu_uuid, lost.id)
    else:
        allocator.reclaim_foreign(lost.gpu_uuid, lost.id)
    allocator.allocate(BOB, ONE_SLICE)
    allocator.reconcile()

    assert isinstance(closed, NodeFault)
    assert lost in node.instances() if way == "adopt" else lost not in node.instances()
    assert not store.read().distrusted


@pytest.mark.parametrize("boards", [[("a30", 1)]])
def test_trust_does_not_come_back_while_a_gpu_cannot_be_read(
    allocator: Allocator, store: Store, node: Node, file: Path
) -> None:
    allocator.allocate(ALICE, ONE_SLICE)
    file.write_bytes(b"")
    node.plant("nvmlDeviceGetGpuInstances", "returns", times=0)

    allocator.reconcile()
    node.mend()

    assert store.read().distrusted
    assert isinstance(refusal(lambda: allocator.allocate(BOB, ONE_SLICE)), NodeFault)


def test_a_boot_drops_all_records_without_a_call_that_changes_anything(
    allocator: Allocator, node: Node, settings: Settings
) -> None:
    allocator.allocate(ALICE, ONE_SLICE)
    (before,) = node.instances()
    node.reboot()
    node.make(before.gpu, before.profile, before.start)
    foreign = node.instances()
    node.configure(log="mutating")

    booted = Store(settings, node.boot_id)
    fresh = Allocator(settings, booted, node.boot_id)
    fresh.reconcile(now=True)
    outcomes = fresh.reclaim(ALICE)

    assert (outcomes, booted.read().records) == ((), ())
    assert (node.instances(), mutating(node)) == (foreign, [])


def test_a_hundred_thousand_ends_do_not_make_the_file_grow(store: Store, file: Path) -> None:
    ends = tuple(Tombstone(f"slurm:alpha:{number}", number) for number in range(100_000))
    with store.transaction() as node:
        node.save(replace(node.state, tombstones=ends))

    assert file.stat().st_size < 128 << 10
    assert store.read().tombstones[-1] == ends[-1]
    assert store.read().ended(Owner("slurm:alpha:99500")) == 99_500


def test_who_ends_many_kernels_displaces_no_end_of_others(store: Store) -> None:
    kernels = tuple(Tombstone(f"jupyter:5:{number}", number) for number in range(1000, 10_000))
    others = (Tombstone("slurm:alpha:1", 1), Tombstone("jupyter:6:1", 2))
    with store.transaction() as node:
        node.save(replace(node.state, tombstones=(*others, *kernels)))

    assert [store.read().ended(Owner(each.owner)) for each in (*others, kernels[-1])] == [1, 2, 9_999]


def test_many_cycles_leave_the_folder_as_large_as_few(allocator: Allocator, settings: Settings) -> None:
    sizes = []
    for _ in range(30):
        allocator.allocate(ALICE, ONE_SLICE)
        allocator.reclaim(ALICE)
        sizes.append(sum(path.stat().st_size for path in Path(settings.state_dir).iterdir()))

    assert sizes[-1] <= sizes[5] + 8


def test_what_everybody_may_read_names_no_owner_and_what_they_may_not_is_roots(
    store: Store, settings: Settings, file: Path
) -> None:
    state = replace(FULL, boot_id="boot", fences={"GPU-2": Fence("a call did not return", 1.0)})
    with store.transaction() as node:
        node.save(state)

    public = Path(settings.run_dir, "public.json")
    text = public.read_text()
    assert [each["kind"] for each in json.loads(text)["records"]] == ["intent", "allocation", "release"]
    assert [word for word in ("slurm", "alpha", "4711", "gone", "MIG-1", "init", '"nonce"') if word in text] == []
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (public, file, file.parent, public.parent)}
    assert modes == {public: 0o644, file: 0o600, file.parent: 0o700, public.parent: 0o755}


def test_a_view_that_cannot_be_written_stops_nobody(allocator: Allocator, settings: Settings, node: Node) -> None:
    Path(settings.run_dir, "public.json.new").mkdir(parents=True)

    allocator.allocate(ALICE, ONE_SLICE)
    allocator.reclaim(ALICE)

    assert node.instances() == []


def test_what_changes_nothing_for_everybody_is_not_published_again(store: Store, settings: Settings) -> None:
    public = Path(settings.run_dir, "public.json")
    intent = record(Intent, "i", 0, maker=Process(1, 2), creating=False)
    with store.transaction() as node:
        node.save(State(intent.boot_id, (intent,)))
        first = public.with_name("first")
        first.hardlink_to(public)

        node.save(node.state.put(replace(intent, creating=True, gi_id=3)))
        node.save(replace(node.state, tombstones=(Tombstone(ALICE.name, 7),)))
        unchanged = first.samefile(public)
        node.save(replace(node.state, fences={"GPU-2": Fence("a call did not return", 1.0)}))

    assert unchanged
    assert json.loads(public.read_text())["fences"] == {"GPU-2": "a call did not return"}


def test_what_is_published_of_the_records_leaves_what_was_seen_of_the_hardware(
    allocator: Allocator, store: Store
) -> None:
    allocator.allocate(ALICE, ONE_SLICE)
    before = store.public()

    allocator.reclaim(ALICE)

    assert [len(view["records"]) for view in (before, store.public())] == [1, 0]
    assert len(before["gpus"]) == 2
    assert store.public() == {**before, "records": []}


@pytest.mark.parametrize("found", [b"", b"{", b'{"gpus": []}\n', b"1\n2\n3\n", None])
def test_a_view_that_was_written_otherwise_is_replaced(store: Store, settings: Settings, found: bytes | None) -> None:
    """As a gres-mig before this one did, or anybody."""
    public = Path(settings.run_dir, "public.json")
    public.parent.mkdir(parents=True)
    if found is not None:
        public.write_bytes(found)

    with store.transaction() as node:
        node.save(FULL)

    assert (len(store.public()["records"]), store.public()["gpus"], store.public()["looked"]) == (3, [], 0.0)


@pytest.fixture
def small(memory: Path) -> Small:
    return Small(memory / "small", managed=2)


@pytest.mark.parametrize("way", ["allocate", "ask again", "reclaim", "adopt", "reconcile after a crash"])
def test_no_failure_of_any_file_call_breaks_anything(small: Small, way: str) -> None:
    codes = (errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOSPC)

    def work(nth: int) -> tuple[Told, int]:
        files = Files(small.settings.state_dir, small.settings.run_dir, nth=nth, code=codes[nth % len(codes)])
        return small.walk(way), files.count

    nth, count, wrong = 0, 1, {}
    # The first that meets no failure is the last.
    while count >= nth:
        nth += 1
        small.restore(small.ways[way].start)
        told, count = each(work, [nth])[0]
        found = list(small.violations(way, told)) + ([] if told.exit in (0, 4) else [f"exit {told.exit}"])
        if found:
            wrong[nth] = found

    assert nth > 12
    assert wrong == {}


@pytest.fixture(params=["tmpfs", "pretended"])
def disk(request: pytest.FixtureRequest, small: Small) -> Iterator[Callable[[], object]]:
    """Fills the disk that the records are on: a real one of 1 MiB, or, where none can be mounted, a pretended one."""
    folder = Path(small.settings.state_dir)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(folder)]
    real = request.param == "tmpfs" and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    if not real:
        yield lambda: Files(str(folder), full=True)
        return
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    try:
        yield lambda: fill(folder / "other")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write until nothing more goes in."""
    with path.open("wb", buffering=0) as stream:
        for size in (4096, 1):
            try:
                while True:
                    stream.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def test_on_a_full_disk_nothing_new_is_begun_and_what_there_is_can_be_given_back(
    small: Small, disk: Callable[[], object]
) -> None:
    def work(_: int) -> tuple[GresMigError, list[tuple[str, str]], list[str]]:
        disk()
        error = refusal(lambda: small.allocator().allocate(BOB, ONE_SLICE))
        begun = small.mutating()
        return error, begun, [outcome.verdict for outcome in small.allocator().reclaim(OWNER)]

    small.restore(small.ways["reclaim"].start)
    ((error, begun, verdicts),) = each(work, [0])

    assert (error.fault.exit_code, error.code) == (4, "STATE")
    assert "No space left" in str(error)
    assert begun == []
    assert verdicts == ["released"]
    assert small.own not in small.node.instances()


def test_space_is_kept_before_there_is_anything_to_give_back(store: Store, settings: Settings) -> None:
    with store.transaction() as node:
        node.save(node.state.put(record(Allocation, "a", 1)))

    kept = Path(settings.state_dir, "spare").stat()
    assert kept.st_size >= 65_536
    assert kept.st_blocks * 512 >= 65_536
