"""GPUs without MIG: who gets a slice of which, what it counts, and what is said of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import until
from commands import nobody, run
from gpus import gpu as board
from hypothesis import given
from hypothesis import strategies as st
from vgpu import require_compiler, slicing

from gres_mig import answers, config, config_schema, machine, slices
from gres_mig.allocator import Allocator
from gres_mig.errors import BadRequest, ConfigError, Conflict, NoCapacity, NodeFault, TooBig
from gres_mig.models import Gpu, Owner, Record, Release, Request, Settings
from gres_mig.placement import Room
from gres_mig.rooms import best
from gres_mig.simulator.admin import Node
from gres_mig.slice_models import Slicing
from gres_mig.state import Store
from gres_mig.values import replace

require_compiler()

ALICE, BOB, CAROL = (Owner(f"manual:{name}") for name in ("alice", "bob", "carol"))


@pytest.fixture
def boards() -> list[tuple[str, int]]:
    return [("l40", 1)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Slicing:
    """A library that limits, for whoever shares all GPUs without MIG."""
    return slicing(tmp_path_factory.mktemp("library"))


@pytest.fixture
def settings(node: Node, library: Slicing) -> Settings:
    return replace(config.defaults(node=node.store.folder), managed=("*",), slicing=library, in_use_wait_s=0.0)


def again(settings: Settings) -> Allocator:
    """The allocator of a process that begins now."""
    boot_id = machine.boot_id(settings.simulator)
    return Allocator(settings, Store(settings, boot_id), boot_id)


def records(settings: Settings) -> tuple[Record, ...]:
    return Store(settings, machine.boot_id(settings.simulator)).read().records


def folders(settings: Settings) -> list[Path]:
    """The slices there are, as the files have them."""
    return sorted(Path(settings.run_dir, "slices").glob("*/GPU-*"))


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is told to end."""
    sleeping = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    yield sleeping
    sleeping.kill()
    sleeping.communicate()


def of_slice(nonce: str, **more: int) -> subprocess.Popen[bytes]:
    """A process whose environment names that slice."""
    command, env = [sys.executable, "-S", "-c", "input()"], {"GRES_MIG_SLICE": nonce}
    if more:
        # Another user may not reach this interpreter.
        command = ["/bin/cat"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=env, cwd="/", **more)


class TestAL40:
    def test_two_owners_share_the_card_each_under_its_limit(self, allocator: Allocator, node: Node) -> None:
        node.configure(log="mutating")
        before = node.hardware()["gpus"]

        told = [answers.environment(allocator.allocate(who, Request(4000)).allocation) for who in (ALICE, BOB)]

        assert {each["CUDA_VISIBLE_DEVICES"] for each in told} == {node.uuids[0]}
        assert [each["CUDA_DEVICE_MEMORY_LIMIT"] for each in told] == ["4000m", "4000m"]
        assert [each["CUDA_DEVICE_MEMORY_LIMIT_0"] for each in told] == ["4000m", "4000m"]
        assert [each["GRES_MIG_ISOLATION"] for each in told] == ["cooperative", "cooperative"]
        assert len({each["CUDA_DEVICE_MEMORY_SHARED_CACHE"] for each in told}) == 2
        assert node.hardware()["gpus"] == before
        assert node.calls() == []

    def test_a_third_that_does_not_fit_is_refused(self, allocator: Allocator, settings: Settings) -> None:
        for who in (ALICE, BOB):
            allocator.allocate(who, Request(4000))

        with pytest.raises(NoCapacity, match=r"the largest that is free is 35,149 MiB, on GPU 0"):
            allocator.allocate(CAROL, Request(35150))

        assert len(records(settings)) == 2
        assert allocator.allocate(CAROL, Request(35149)).created

    def test_records_survive_a_restart(self, allocator: Allocator, settings: Settings) -> None:
        first = allocator.allocate(ALICE, Request(4000)).allocation

        second = again(settings).allocate(ALICE, Request(4000))

        assert (second.allocation.nonce, second.created) == (first.nonce, False)
        assert answers.environment(second.allocation) == answers.environment(first)

    def test_what_is_given_back_is_gone(self, allocator: Allocator, settings: Settings) -> None:
        allocator.allocate(ALICE, Request(4000))

        (outcome,) = allocator.reclaim(ALICE)

        assert outcome.verdict == "released"
        assert (folders(settings), records(settings)) == ([], ())
        assert allocator.allocate(BOB, Request(44173)).created

    def test_an_owner_asks_for_one_thing(self, allocator: Allocator) -> None:
        allocator.allocate(ALICE, Request(4000))

        with pytest.raises(Conflict, match="holds slice for 4,000 MiB"):
            allocator.allocate(ALICE, Request(5000))

    def test_more_than_the_card_has_is_too_big(self, allocator: Allocator) -> None:
        # 46,068 MiB, less 3 % and the overhead of one slice.
        with pytest.raises(TooBig, match="the largest is 44,173 MiB"):
            allocator.allocate(ALICE, Request(44174))

    def test_a_slice_has_no_profile(self, allocator: Allocator) -> None:
        with pytest.raises(BadRequest, match=r"no profile 1g\.5gb can be had as a slice"):
            allocator.allocate(ALICE, Request(0, "1g.5gb"))

    def test_one_cannot_be_adopted(self, allocator: Allocator, node: Node) -> None:
        allocator.allocate(ALICE, Request(4000))

        with pytest.raises(BadRequest, match="cannot adopt slice 0"):
            allocator.adopt(BOB, node.uuids[0], 0)

    def test_mig_cannot_be_turned_on_under_slices(self, node: Node, settings: Settings) -> None:
        self.write(node, 'slices = "*"')

        ran = run(node, "enable-mig", node.uuids[0])

        assert (ran.code, "it is shared by slices" in ran.err) == (2, True)

    def test_no_back_end_is_a_reason(self, allocator: Allocator, settings: Settings) -> None:
        bare = again(replace(settings, slicing=Slicing(gpus=("*",))))

        with pytest.raises(NodeFault, match="hami_core names no library, and experimental_driver_limit is off"):
            bare.allocate(ALICE, Request(4000))

    def test_a_library_that_others_can_change_is_none(
        self, settings: Settings, tmp_path: Path, allocator: Allocator
    ) -> None:
        loose = tmp_path / "libvgpu.so"
        loose.write_bytes(Path(settings.slicing.hami_core).read_bytes())
        loose.chmod(0o777)
        trusting = again(replace(settings, slicing=replace(settings.slicing, hami_core=str(loose))))

        with pytest.raises(NodeFault, match=r"is not root's alone: .* has mode 0777"):
            trusting.allocate(ALICE, Request(4000))

    def test_a_library_behind_a_link_that_others_can_change_is_none(
        self, settings: Settings, tmp_path: Path, allocator: Allocator
    ) -> None:
        """The link and what it leads to are root's alone; what lies between them is not."""
        between = tmp_path / "between"
        between.mkdir()
        (between / "second.so").symlink_to(settings.slicing.hami_core)
        between.chmod(0o757)
        (tmp_path / "first.so").symlink_to("between/second.so")
        trusting = again(replace(settings, slicing=replace(settings.slicing, hami_core=str(tmp_path / "first.so"))))

        with pytest.raises(NodeFault, match=rf"is not root's alone: {between} .* has mode 0757"):
            trusting.allocate(ALICE, Request(4000))

    def test_a_reboot_leaves_nothing_of_it(self, allocator: Allocator, settings: Settings, node: Node) -> None:
        allocator.allocate(ALICE, Request(4000))

        node.reboot()

        assert again(settings).allocate(BOB, Request(44173)).created
        assert len(folders(settings)) == 1

    def test_root_makes_none_in_a_run_folder_that_a_user_has(
        self, allocator: Allocator, settings: Settings, tmp_path: Path
    ) -> None:
        """His `slices` may be a link to a folder of somebody else."""
        if os.geteuid() != 0:
            pytest.skip("only root gives something to another user")
        (tmp_path / "kept").mkdir()
        os.makedirs(settings.run_dir, exist_ok=True)
        os.symlink(tmp_path, os.path.join(settings.run_dir, "slices"))
        os.chown(settings.run_dir, 65534, -1)

        with pytest.raises(NodeFault, match="is another user's"):
            allocator.allocate(ALICE, Request(4000))

        assert (tmp_path / "kept").exists()

    def test_a_slice_whose_folder_is_gone_is_lost(self, allocator: Allocator, settings: Settings) -> None:
        allocator.allocate(ALICE, Request(4000))
        (folder,) = folders(settings)
        shutil.rmtree(folder / "own")

        (outcome,) = allocator.reconcile()

        assert outcome.verdict == "lost"

    def test_a_slice_ends_with_its_witnesses(
        self, allocator: Allocator, settings: Settings, program: subprocess.Popen[bytes]
    ) -> None:
        allocator = again(replace(settings, young_s=0.0))
        lives = machine.process(program.pid)
        assert lives is not None
        allocator.allocate(ALICE, Request(4000), witnesses=(lives,))
        kept = allocator.reconcile()

        program.kill()
        program.wait()
        (outcome,) = allocator.reconcile()

        assert (kept, outcome.verdict) == ((), "released")

    def test_damaged_records_leave_slices_that_keep_their_memory(
        self, allocator: Allocator, settings: Settings, node: Node
    ) -> None:
        allocator.allocate(ALICE, Request(4000))
        Path(settings.state_dir, "state.json").write_text("{")

        with pytest.raises(NodeFault, match="1 instances on it are not recorded"):
            again(settings).allocate(BOB, Request(4000))

        again(settings).reclaim_foreign(node.uuids[0], 0)
        again(settings).reconcile()
        assert again(settings).allocate(BOB, Request(44173)).created

    @staticmethod
    def write(node: Node, *lines: str) -> None:
        """The node's configuration."""
        Path(node.store.folder, "config.toml").write_text("\n".join(('gpus = "*"', *lines, "")))


class TestTwoGpus:
    @pytest.fixture
    def boards(self) -> list[tuple[str, int]]:
        return [("l40", 2)]

    def test_the_first_slice_after_a_boot_leaves_one_that_was_made_meanwhile(
        self, allocator: Allocator, settings: Settings, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        listing = os.listdir

        def listed(path: str) -> list[str]:
            if path == os.path.join(settings.run_dir, "slices"):
                monkeypatch.undo()
                again(settings).allocate(BOB, Request(4000, gpus=(node.uuids[1],)))
            return listing(path)

        monkeypatch.setattr(os, "listdir", listed)

        allocator.allocate(ALICE, Request(4000, gpus=(node.uuids[0],)))

        assert {folder.name.partition(".")[0] for folder in folders(settings)} == set(node.uuids)

    def test_who_has_a_slice_of_another_gpu_is_of_no_slice_on_this_one(self, allocator: Allocator, node: Node) -> None:
        slice_ = allocator.allocate(ALICE, Request(4000, gpus=(node.uuids[0],))).allocation
        user = of_slice(slice_.nonce)
        node.hold(1, pid=user.pid, memory_mib=30000)

        seen = allocator.look()
        user.communicate()

        assert [gpu.foreign_mib for gpu in seen] == [0, 30000]


class TestInUse:
    def test_a_slice_with_memory_in_use_is_stuck_and_withheld(
        self, allocator: Allocator, settings: Settings, node: Node
    ) -> None:
        slice_ = allocator.allocate(ALICE, Request(40000)).allocation
        user = of_slice(slice_.nonce)
        node.hold(0, pid=user.pid, memory_mib=3000)

        (outcome,) = allocator.reclaim(ALICE)

        assert (outcome.verdict, f"pid {user.pid} " in outcome.reason) == ("stuck", True)
        with pytest.raises(NoCapacity):
            allocator.allocate(BOB, Request(8000))
        user.communicate()
        assert [o.verdict for o in again(settings).reconcile(now=True)] == ["released"]
        assert allocator.allocate(BOB, Request(8000)).created

    def test_a_neighbours_process_does_not_keep_it(self, allocator: Allocator, node: Node) -> None:
        mine = allocator.allocate(ALICE, Request(4000)).allocation
        allocator.allocate(BOB, Request(4000))
        user = of_slice(mine.nonce)
        node.hold(0, pid=user.pid, memory_mib=3000)

        (outcome,) = allocator.reclaim(BOB)
        user.communicate()

        assert outcome.verdict == "released"

    def test_a_process_of_no_slice_counts_and_is_left_alone(
        self, allocator: Allocator, settings: Settings, node: Node, program: subprocess.Popen[bytes]
    ) -> None:
        node.hold(0, pid=program.pid, memory_mib=30000)

        with pytest.raises(NoCapacity, match="14,173 MiB"):
            allocator.allocate(ALICE, Request(20000))
        TestAL40.write(node, 'slices = "*"')
        shown = run(node, "status")

        assert f"processes of no slice use 30,000 MiB: pid {program.pid}" in shown.out
        assert program.poll() is None
        node.let_go(0, pid=program.pid)
        assert allocator.allocate(ALICE, Request(20000)).created

    def test_a_kernels_children_are_its_slices(
        self, allocator: Allocator, node: Node, program: subprocess.Popen[bytes]
    ) -> None:
        kernel = subprocess.Popen(
            ["/bin/sh", "-c", "env -i sleep 600 & echo $!; read line; kill $!"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert kernel.stdout
        child, lives = int(kernel.stdout.readline()), machine.process(kernel.pid)
        assert lives is not None
        nonce = allocator.allocate(ALICE, Request(4000), witnesses=(lives,)).allocation.nonce
        node.hold(0, pid=child, memory_mib=700)

        (gpu,) = allocator.look()
        kernel.communicate("\n")

        assert [(user.pid, user.memory_mib, user.slice) for user in gpu.users] == [(child, 700, nonce)]
        assert gpu.foreign_mib == 0

    def test_a_slice_that_another_user_claims_is_not_his(
        self, allocator: Allocator, settings: Settings, node: Node
    ) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root starts processes of other users")
        slice_ = allocator.allocate(ALICE, Request(4000)).allocation
        store = Store(settings, machine.boot_id(settings.simulator))
        with store.transaction() as state:
            state.save(state.state.put(replace(slice_, owner=Owner(ALICE.name, uid=1))))
        liar, owners = (of_slice(slice_.nonce, user=uid) for uid in (65534, 1))
        for process in (liar, owners):
            # Its environment is the old one until it is another program.
            until(lambda process=process: b"cat" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
            node.hold(0, pid=process.pid, memory_mib=100)

        (gpu,) = allocator.look()
        for process in (liar, owners):
            process.communicate()

        assert {user.pid: user.slice for user in gpu.users} == {liar.pid: "", owners.pid: slice_.nonce}


class TestAMixedNode:
    @pytest.fixture
    def boards(self) -> list[tuple[str, int]]:
        return [("l40", 1), ("h200", 1), ("rtx-pro-6000", 1)]

    def test_all_three_kinds_serve_one_request(self, allocator: Allocator, node: Node) -> None:
        models = dict(zip(node.uuids, ("L40", "H200", "RTX PRO 6000"), strict=True))

        given = [allocator.allocate(Owner(f"manual:n{n}"), Request(8000)).allocation for n in range(7 + 4 + 5)]
        with pytest.raises(NoCapacity) as full:
            allocator.allocate(ALICE, Request(8000))

        assert "places for 1g.18gb are taken" in str(full.value)
        assert "no room for a slice of 8,000 MiB" in str(full.value)
        kinds = [(models[each.gpu_uuid], each.isolation) for each in given]
        assert kinds == sorted(kinds, key=lambda kind: kind[0] == "L40")
        assert {kind: kinds.count(kind) for kind in kinds} == {
            ("H200", "env"): 7,
            ("RTX PRO 6000", "env"): 4,
            ("L40", "cooperative"): 5,
        }

    def test_what_no_instance_holds_may_be_a_slice(self, allocator: Allocator, node: Node) -> None:
        for gpu in (1, 2):
            node.set_mig(gpu, False)

        assert allocator.allocate(ALICE, Request(8000)).allocation.gpu_uuid == node.uuids[0]

    def test_who_insists_on_mig_gets_no_slice(self, allocator: Allocator, node: Node) -> None:
        for gpu in (1, 2):
            node.set_mig(gpu, False)

        with pytest.raises(NodeFault, match="MIG mode is off"):
            allocator.allocate(ALICE, Request(8000, isolation="mig"))
        with pytest.raises(BadRequest, match="isolation=mig was asked for"):
            allocator.allocate(ALICE, Request(8000, gpus=(node.uuids[0],), isolation="mig"))

    def test_who_names_a_shared_gpu_gets_a_slice_of_it(self, allocator: Allocator, node: Node) -> None:
        allocation = allocator.allocate(ALICE, Request(8000, gpus=(node.uuids[0],))).allocation

        assert (allocation.slice, allocation.profile_name) == ("cooperative", "slice")

    def test_what_is_said_of_it(self, node: Node, library: Slicing) -> None:
        TestAL40.write(
            node, 'slices = "*"', f'hami_core = "{library.hami_core}"', f'keep_umask = "{library.keep_umask}"'
        )
        l40 = node.uuids[0]
        words = ("allocate", "--owner", "manual:alice", "--memory", "4000", "--gpu", l40)

        made, plain = run(node, *words), run(node, *words, "--json").plain
        status, shown = run(node, "status"), run(node, "status", "--json").plain["gpus"][0]
        why, wont = run(node, "why", "4000", "--gpu", l40), run(node, "why", "44000", "--gpu", l40)
        insisted = run(node, *words, "--isolation", "mig", "--owner", "manual:bob")

        assert made.out == f"manual:alice has slice (4,000 MiB) for 4,000 MiB: of {l40}, isolation=cooperative\n"
        assert (plain["isolation"], plain["mig_uuid"], plain["created"]) == ("cooperative", l40, False)
        assert "4,512 MiB of 44,685 MiB are taken" in " ".join(status.out.split())
        assert shown["shared"] == {
            "isolation": "cooperative",
            "capacity_mib": 44685,
            "held_mib": 4512,
            "overhead_mib": 512,
            "foreign_mib": 0,
        }
        assert [each["isolation"] for each in shown["holdings"]] == ["cooperative"]
        assert (why.code, "isolation=cooperative" in why.out) == (0, True)
        assert (wont.code, "room when this ends: manual:alice (a slice of 4,000 MiB)" in wont.out) == (3, True)
        assert (insisted.code, "shared by slices" in insisted.err) == (2, True)
        assert run(node, "status", "--check").code == 0

    def test_others_see_how_much_is_taken_and_not_by_whom(
        self, node: Node, library: Slicing, settings: Settings
    ) -> None:
        TestAL40.write(
            node, 'slices = "*"', f'hami_core = "{library.hami_core}"', f'keep_umask = "{library.keep_umask}"'
        )
        run(node, "allocate", "--owner", "manual:alice", "--memory", "4000", "--gpu", node.uuids[0])
        run(node, "status")

        with nobody(node, settings):
            shown = run(node, "status")
            plain = run(node, "status", "--json").plain["gpus"][0]

        assert plain["shared"]["held_mib"] == 4512
        assert "alice" not in shown.out
        published = json.loads(Path(settings.run_dir, "public.json").read_text())
        assert "users" not in published["gpus"][0]


class TestTheDriversOwnLimit:
    @pytest.fixture
    def settings(self, node: Node) -> Settings:
        node.configure(driver="615.10.04")
        cgroups = Path(node.store.folder, "sys/fs/cgroup")
        cgroups.mkdir(parents=True)
        (cgroups / "cgroup.controllers").touch()
        settings = replace(config.defaults(node=node.store.folder), in_use_wait_s=0.0, bare_grace_s=0.0)
        return replace(settings, slicing=Slicing(gpus=("*",), driver_limit=True))

    def limits(self, node: Node) -> dict[str, int]:
        return {os.path.basename(path): mib >> 20 for path, mib in node.hardware()["gpus"][0].get("limits", {}).items()}

    def test_it_holds_a_cgroup_to_what_was_asked_for(self, allocator: Allocator, node: Node) -> None:
        allocation = allocator.allocate(ALICE, Request(4000)).allocation
        allocator.allocate(Owner("slurm:c:17", 1000, 5), Request(2000))

        assert (allocation.isolation, allocation.overhead_mib) == ("driver-limit", 0)
        assert self.limits(node) == {"manual-alice": 4000, "job_17": 2000}
        assert answers.environment(allocation)["GRES_MIG_CGROUP"].endswith("sys/fs/cgroup/gres-mig/manual-alice")

    def test_a_kernel_that_nothing_puts_into_a_cgroup_gets_none(self, allocator: Allocator, node: Node) -> None:
        with pytest.raises(NodeFault, match="nothing puts the processes of jupyter:1000:k into a cgroup"):
            allocator.allocate(Owner("jupyter:1000:k", 1000), Request(4000))

        assert self.limits(node) == {}

    def test_it_is_lifted_with_the_slice(self, allocator: Allocator, node: Node, settings: Settings) -> None:
        allocation = allocator.allocate(ALICE, Request(4000)).allocation

        allocator.reclaim(ALICE)

        assert self.limits(node) == {}
        assert not os.path.exists(answers.environment(allocation)["GRES_MIG_CGROUP"])

    def test_it_is_the_stronger_one(self, allocator: Allocator, settings: Settings, library: Slicing) -> None:
        both = again(replace(settings, slicing=replace(library, driver_limit=True)))

        assert both.allocate(ALICE, Request(4000)).allocation.isolation == "driver-limit"

    def test_an_older_driver_has_none(self, node: Node, settings: Settings) -> None:
        node.configure(driver="580.159.04")

        with pytest.raises(NodeFault, match=r"the driver has no nvmlDeviceSetMemoryLimits_v1 \(615"):
            again(settings).allocate(ALICE, Request(4000))

    def test_a_limit_that_the_driver_refuses_leaves_nothing(
        self, node: Node, settings: Settings, allocator: Allocator
    ) -> None:
        node.plant("nvmlDeviceSetMemoryLimits_v1", "returns", code=999)

        with pytest.raises(NodeFault, match="limiting the memory of"):
            allocator.allocate(ALICE, Request(4000))

        assert (folders(settings), records(settings), self.limits(node)) == ([], (), {})

    def test_a_limit_that_the_driver_only_says_it_set_is_noticed(self, node: Node, allocator: Allocator) -> None:
        node.plant("nvmlDeviceSetMemoryLimits_v1", "lies")

        with pytest.raises(NodeFault, match="reading back the memory limit"):
            allocator.allocate(ALICE, Request(4000))

    def test_a_limit_that_cannot_be_lifted_keeps_its_room(
        self, node: Node, settings: Settings, allocator: Allocator
    ) -> None:
        allocator.allocate(ALICE, Request(40000))
        node.plant("nvmlDeviceSetMemoryLimits_v1", "returns", code=999)

        (outcome,) = allocator.reclaim(ALICE)

        assert outcome.verdict == "stuck"
        (left,) = records(settings)
        assert isinstance(left, Release)
        with pytest.raises(NoCapacity):
            allocator.allocate(BOB, Request(8000))
        node.mend()
        # What is bare goes when it was seen so twice.
        assert [o.verdict for _ in range(2) for o in allocator.reconcile(now=True)] == ["stuck", "released"]


class TestTheChoice:
    SHARED = replace(Settings("", "", managed=("*",)), slicing=Slicing(gpus=("*",)))

    @staticmethod
    def shared(index: int, held_mib: int = 0) -> Room:
        gpu = replace(board("l40", index), sliced=True, backend="cooperative")
        return Room(gpu, held_mib=held_mib)

    def test_the_least_room_that_is_enough_is_taken(self) -> None:
        rooms = [self.shared(0), self.shared(1, 30000), self.shared(2, 42000)]

        chosen = [best(rooms, Request(mib), self.SHARED).gpu_uuid for mib in (1000, 10000, 40000)]

        assert chosen == [rooms[2].gpu.uuid, rooms[1].gpu.uuid, rooms[0].gpu.uuid]

    @given(st.lists(st.integers(1, 50000), max_size=30), st.integers(0, 5000), st.integers(0, 20000))
    def test_no_gpu_gives_more_than_it_has(self, asked: list[int], overhead_mib: int, reserve_mib: int) -> None:
        slicing = Slicing(gpus=("*",), overhead_mib=overhead_mib, reserve_mib=reserve_mib)
        settings = replace(self.SHARED, slicing=slicing)
        gpu = replace(board("l40"), sliced=True, backend="cooperative", reserved_mib=600)
        room, taken = Room(gpu), 0
        for mib in asked:
            try:
                choice = best([room], Request(mib), settings)
            except (NoCapacity, TooBig):
                assert taken + mib + overhead_mib > 46068 - 600 - reserve_mib
                continue
            taken += mib + overhead_mib
            assert not room.taken & choice.placement.mask
            room = replace(room, busy=(*room.busy, choice.placement), held_mib=taken)

        assert taken <= 46068 - 600 - reserve_mib

    def test_the_fewest_and_smallest_ends_make_room(self, allocator: Allocator, settings: Settings) -> None:
        for who, mib in ((ALICE, 4000), (BOB, 12000), (CAROL, 20000)):
            allocator.allocate(who, Request(mib))
        held = records(settings)
        room = self.shared(0, sum(r.memory_mib + r.overhead_mib for r in held))

        ends = [slices.makes_room(room, held, Request(mib), self.SHARED) for mib in (10000, 20000, 39000)]

        assert [{r.owner.name for r in end} for end in ends] == [
            {ALICE.name},
            {CAROL.name},
            {BOB.name, CAROL.name},
        ]


class TestTheConfiguration:
    UUID = "GPU-5f8a3c1e-0d2b-4e6f-9a7c-1b2d3e4f5a6b"

    def refused(self, text: str) -> str:
        with pytest.raises(ConfigError) as caught:
            config_schema.validate(text, config.defaults("/etc/gres-mig/config.toml"))
        return str(caught.value)

    def test_a_gpu_in_both_lists_is_refused(self) -> None:
        said = self.refused(f'gpus = ["{self.UUID}"]\nslices = ["{self.UUID}"]')

        assert said.startswith(f"/etc/gres-mig/config.toml:2: slices: found {self.UUID}, which gpus has too")

    @pytest.mark.parametrize("path", ["libvgpu.so", "/opt/a b/libvgpu.so", "/opt/a:b.so", "/opt/$LIB/libvgpu.so", "."])
    def test_what_ld_preload_cannot_say_is_refused(self, path: str) -> None:
        assert "hami_core: found" in self.refused(f'hami_core = "{path}"')

    def test_by_two_names_it_is_noticed_when_it_is_seen(self, node: Node, library: Slicing, settings: Settings) -> None:
        pci = node.hardware()["gpus"][0]["pci"].lower()
        twice = replace(settings, managed=(node.uuids[0],), slicing=replace(library, gpus=(pci,)))

        (gpu,) = again(twice).look()

        assert gpu.trouble == "it is named both in gpus and in slices; take it out of one"

    @pytest.mark.parametrize(
        ("managed", "shared", "expected"),
        [
            (("*",), (), ["divided", "divided"]),
            (("*",), ("*",), ["shared", "divided"]),
            ((), ("*",), ["shared", "left alone"]),
            (("*",), ("h200",), ["divided", "shared"]),
            (("l40",), ("*",), ["divided", "left alone"]),
        ],
    )
    def test_a_name_says_more_than_a_star(
        self, managed: tuple[str, ...], shared: tuple[str, ...], expected: list[str]
    ) -> None:
        gpus = [board("l40"), board("h200")]
        uuids = {"l40": gpus[0].uuid, "h200": gpus[1].uuid, "*": "*"}
        settings = replace(
            TestTheChoice.SHARED,
            managed=tuple(uuids[name] for name in managed),
            slicing=Slicing(gpus=tuple(uuids[name] for name in shared)),
        )

        def said(gpu: Gpu) -> str:
            if settings.shares(gpu):
                return "shared"
            return "divided" if settings.manages(gpu) else "left alone"

        assert [said(gpu) for gpu in gpus] == expected

    def test_what_is_kept_of_it_says_the_same(self, node: Node, library: Slicing) -> None:
        TestAL40.write(node, 'slices = "*"', f'hami_core = "{library.hami_core}"', 'slice_reserve = "2G"')

        first, second = (config.load(node=node.store.folder) for _ in range(2))

        assert first == second
        assert (first.slicing.gpus, first.slicing.reserve_mib, first.slicing.overhead_mib) == (("*",), 2048, -1)
