"""What holds a slice to its memory, in real processes: preload, variables, the probe, the umask, the police."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import run as run_command
from commands import run
from vgpu import PROGRAM, built, require_compiler, slicing

from gres_mig import answers, config, log, machine, slice_users
from gres_mig.allocator import Allocator
from gres_mig.errors import Busy, NodeFault
from gres_mig.models import Allocation, Owner, Request, Settings
from gres_mig.simulator.admin import Node
from gres_mig.state import Store
from gres_mig.values import replace

require_compiler()

ALICE = Owner("manual:alice")


@pytest.fixture
def boards() -> list[tuple[str, int]]:
    return [("l40", 1)]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the libraries of these tests are built; anybody may load them."""
    folder = tmp_path_factory.mktemp("libraries")
    slicing(folder)
    return folder


@pytest.fixture
def settings(node: Node, libraries: Path) -> Settings:
    return replace(config.defaults(node=node.store.folder), slicing=slicing(libraries), in_use_wait_s=0.0)


def allocator(settings: Settings, **changes: Any) -> Allocator:
    """The node's, with other ways to limit slices."""
    settings = replace(settings, slicing=replace(settings.slicing, **changes))
    boot_id = machine.boot_id(settings.simulator)
    return Allocator(settings, Store(settings, boot_id), boot_id)


@pytest.fixture
def alice(settings: Settings) -> Allocation:
    """A slice of 4,000 MiB."""
    return allocator(settings).allocate(ALICE, Request(4000)).allocation


def program(allocation: Allocation, code: str, own: Mapping[str, str] | None = None, **more: Any) -> str:
    """What a program of the slice's owner prints, whose umask is 027 as he set it, and whose environment is `own`."""
    env = answers.added(answers.environment(allocation), own or {})
    command = [sys.executable, "-S", "-c", PROGRAM + code]
    done = subprocess.run(command, env=env, umask=0o027, capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class TestTheLimit:
    def test_a_program_sees_and_gets_what_its_owner_asked_for(self, alice: Allocation) -> None:
        assert program(alice, "print(total.value >> 20, taken)") == "4000 4000"

    def test_a_child_of_it_does_too(self, alice: Allocation, tmp_path: Path) -> None:
        child = tmp_path / "child.py"
        child.write_text(PROGRAM + "print(total.value >> 20)")

        said = program(alice, f"import subprocess; subprocess.run([sys.executable, '-S', {str(child)!r}])")

        assert said == "4000"

    def test_what_the_user_preloads_is_kept(self, alice: Allocation, tmp_path: Path) -> None:
        source, own = tmp_path / "own.c", tmp_path / "own.so"
        source.write_text("int own(void) { return 17; }\n")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", own, source], check=True)

        said = program(alice, "print(ctypes.CDLL(None).own(), total.value >> 20)", {"LD_PRELOAD": str(own)})

        assert said == "17 4000"

    def test_what_is_preloaded_already_is_not_preloaded_twice(self, alice: Allocation) -> None:
        variables = answers.environment(alice)

        once = answers.added(variables, {"LD_PRELOAD": "/own.so"})
        twice = answers.added(variables, once)

        assert once["LD_PRELOAD"] == f"{variables['LD_PRELOAD']}:/own.so"
        assert twice == once

    def test_a_shell_is_told_so_that_its_own_preload_stays(self, alice: Allocation, node: Node) -> None:
        Path(node.store.folder, "config.toml").write_text('slices = "*"\n')
        told = run(node, "env", "manual:alice").out
        script = f'LD_PRELOAD=/own.so\n{told}unset -f x; echo "$LD_PRELOAD"; exit'

        # By the shell alone: with these preloaded no other program is started.
        said = subprocess.run(["/bin/sh"], input=script, capture_output=True, text=True, check=True).stdout

        assert said == f"{answers.environment(alice)['LD_PRELOAD']}:/own.so\n"

    def test_without_the_preload_there_is_none(self, alice: Allocation) -> None:
        """What a cooperative limit is: said in docs/slices.md, and shown here."""
        env = answers.environment(alice)
        library = env.pop("CUDA_REDIRECT")
        code = PROGRAM.replace("libcuda.so.1", library) + "print(total.value >> 20)"

        env.update(LD_PRELOAD="", CUDA_DEVICE_MEMORY_LIMIT_0="0")
        said = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=True)

        assert said.stdout == "46068\n"


class TestTheUmask:
    WRITES = "open({!r}, 'w').close()\nprint(oct(os.stat({!r}).st_mode & 0o777))"

    def test_what_a_job_writes_has_its_users_mode(self, alice: Allocation, tmp_path: Path) -> None:
        file = str(tmp_path / "result")

        assert program(alice, self.WRITES.format(file, file)) == "0o640"

    def test_what_its_children_write_too(self, alice: Allocation, tmp_path: Path) -> None:
        file = str(tmp_path / "result")

        said = program(alice, f"print(os.system('touch {file}')); print(oct(os.stat({file!r}).st_mode & 0o777))")

        assert said.split() == ["0", "0o640"]

    @pytest.mark.parametrize("mask", [0o000, 0o077])
    def test_a_program_that_sets_its_own_gets_it(self, alice: Allocation, mask: int) -> None:
        assert program(alice, f"os.umask({mask}); print(os.umask(0))") == str(mask)

    def test_without_the_library_that_keeps_it_nothing_starts(self, settings: Settings) -> None:
        with pytest.raises(NodeFault, match="changes its umask to 0: all that it writes") as no:
            allocator(settings, keep_umask="").allocate(ALICE, Request(4000))

        assert "gres-mig slices build" in no.value.hint

    def test_a_library_that_keeps_it_by_itself_needs_no_other(self, settings: Settings, libraries: Path) -> None:
        library = built(libraries, "KEEPS_UMASK")

        assert allocator(settings, hami_core=library, keep_umask="").allocate(ALICE, Request(4000)).created


class TestTheProbe:
    @pytest.mark.parametrize(
        ("way", "said"),
        [
            ("NO_LIMIT", "the limit of 4,000 MiB is not in force: .* sees 46,068 MiB"),
            ("FAILS", "cuInit answers 999"),
            ("HANGS", "did not end within 0.5 s"),
        ],
    )
    def test_a_library_that_does_not_limit_gives_no_slice(
        self, settings: Settings, libraries: Path, way: str, said: str
    ) -> None:
        broken = replace(settings, hardware_timeout_s=1.0)

        with pytest.raises(NodeFault, match=said) as refused:
            allocator(broken, hami_core=built(libraries, way)).allocate(ALICE, Request(4000))

        assert (refused.value.code, refused.value.fault.exit_code) == ("SLICE", 4)
        assert Store(settings, machine.boot_id(settings.simulator)).read().records == ()
        assert list(Path(settings.run_dir, "slices").glob("*/*")) == []

    def test_what_cannot_be_preloaded_is_found(self, settings: Settings, tmp_path: Path) -> None:
        """The loader goes on without it, with a line on standard error."""
        nothing = tmp_path / "libvgpu.so"
        nothing.write_text("no library\n")
        nothing.chmod(0o755)

        with pytest.raises(NodeFault, match=r"starting a process under .* cannot be preloaded"):
            allocator(settings, hami_core=str(nothing)).allocate(ALICE, Request(4000))

    def test_it_leaves_nothing_in_the_file_that_the_job_finds(self, settings: Settings, libraries: Path) -> None:
        counting = allocator(settings, hami_core=built(libraries, "WRITES"))

        cache = self.cache(counting.allocate(ALICE, Request(4000)).allocation)

        assert cache.stat().st_size == 0

    def test_its_user_has_that_file_and_no_folder_that_root_would_walk(self, settings: Settings) -> None:
        cache = self.cache(allocator(settings).allocate(ALICE, Request(4000)).allocation)

        assert (cache.stat().st_uid, cache.stat().st_mode & 0o777) == (ALICE.uid or os.geteuid(), 0o600)
        assert (cache.parent.stat().st_uid, cache.parent.stat().st_mode & 0o777) == (os.geteuid(), 0o711)

    @pytest.mark.parametrize(("way", "said"), [("KILLED", "it ended with -9"), ("TRACED", "it says '. nonsense'")])
    def test_who_ends_or_changes_it_has_no_fault_found_with_the_node(
        self, settings: Settings, way: str, said: str
    ) -> None:
        """As `pkill -u alice` and a debugger of hers do."""
        if os.geteuid() != 0:
            pytest.skip("only root starts processes of other users")
        # Where other users may go, which is not below pytest's own folder.
        with tempfile.TemporaryDirectory(prefix="gres-mig-") as folder:
            os.chmod(folder, 0o755)
            theirs = replace(settings, run_dir=f"{folder}/run", slicing=slicing(Path(folder), way))

            with pytest.raises(Busy, match=f"as uid 6: {said}; as uid 65534 it works"):
                allocator(theirs).allocate(Owner("manual:alice", 6), Request(4000))

            assert list(Path(theirs.run_dir, "slices").glob("*/*")) == []

    @staticmethod
    def cache(allocation: Allocation) -> Path:
        """The library's own file."""
        return Path(answers.environment(allocation)["CUDA_DEVICE_MEMORY_SHARED_CACHE"])

    def test_its_failure_is_one_line_and_the_nodes_fault(self, node: Node, libraries: Path) -> None:
        library = built(libraries, "NO_LIMIT")
        Path(node.store.folder, "config.toml").write_text(f'slices = "*"\nhami_core = "{library}"\n')

        ran = run(node, "allocate", "--owner", "manual:alice", "--memory", "4000")

        assert ran.code == 4
        assert len([line for line in ran.err.splitlines() if line.startswith("gres-mig: ")]) == 1

    def test_the_admins_own_test_says_the_same(self, node: Node, libraries: Path, settings: Settings) -> None:
        file = Path(node.store.folder, "config.toml")
        good, bad = settings.slicing.hami_core, built(libraries, "NO_LIMIT")
        answered = []
        for library in (good, bad):
            text = f'slices = "*"\nhami_core = "{library}"\nkeep_umask = "{settings.slicing.keep_umask}"\n'
            file.write_text(text)
            answered.append(run(node, "slices", "test"))

        held, loose = answered

        assert (held.code, held.out) == (0, f"{node.uuids[0]}: 1,024 MiB are held to, cooperative\n")
        assert (loose.code, "is not in force" in loose.out) == (4, True)
        assert run(node, "status", "--json").plain["gpus"][0]["holdings"] == []

    def test_a_library_that_the_owner_cannot_read_is_found(self, settings: Settings, libraries: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root starts processes of other users")
        libraries.chmod(0o700)

        with pytest.raises(NodeFault, match="as uid 65534"):
            allocator(settings).allocate(Owner("jupyter:65534:k", 65534), Request(4000))

        libraries.chmod(0o755)
        assert list(Path(settings.run_dir, "slices").glob("*/*")) == []


class TestWhose:
    @pytest.mark.parametrize(
        "cgroups",
        [
            "0::/system.slice/slurmstepd.scope/job_17/step_0/user/task_0\n",
            "0::/system.slice/n1_slurmstepd.scope/job_17\n",
            "12:cpuset:/\n4:memory:/slurm/uid_1000/job_17/step_batch/task_0\n",
            "4:memory:/slurm_n1/uid_1000/job_17/step_batch\n",
        ],
    )
    def test_a_process_in_slurms_cgroup_is_its_jobs(self, cgroups: str) -> None:
        assert slice_users.job_of(cgroups) == "17"

    @pytest.mark.parametrize(
        "cgroup",
        [
            "user.slice/user-1000.slice/user@1000.service/job_17",
            "user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_17",
            "user.slice/user-1000.slice/user@1000.service/slurm/uid_1001/job_17",
            "system.slice/slurmstepd.scope/job_17x",
        ],
    )
    def test_a_cgroup_that_its_user_named_makes_it_nobodys(self, cgroup: str) -> None:
        """Else who names one like another's job has that job ended for the memory he uses."""
        assert slice_users.job_of(f"0::/{cgroup}\n1:name=systemd:/{cgroup}\n") == ""


class TestThePolice:
    @pytest.fixture
    def over(self, alice: Allocation, node: Node) -> Iterator[subprocess.Popen[bytes]]:
        """A process of the slice that uses 100 MiB more than was set aside for it, and does not care for SIGTERM."""
        code = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True)); print(); input()"
        env = answers.added(answers.environment(alice), {})
        user = subprocess.Popen(
            [sys.executable, "-S", "-u", "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert user.stdout
        user.stdout.readline()
        node.hold(0, pid=user.pid, memory_mib=4612)
        yield user
        user.kill()
        user.communicate()

    @staticmethod
    def patrolled(settings: Settings, at: float) -> None:
        """One pass of the service at that time."""
        boot_id = machine.boot_id(settings.simulator)
        Allocator(settings, Store(settings, boot_id), boot_id, clock=lambda: at).reconcile()

    def test_a_slice_over_its_grant_is_told_of_once(
        self, over: subprocess.Popen[bytes], alice: Allocation, settings: Settings
    ) -> None:
        said: list[str] = []
        log.send_to(lambda level, line: said.append(line))
        now = alice.since

        for later in (20, 30, 4000):
            self.patrolled(settings, now + later)

        assert [line for line in said if "manual:alice uses 4,612 MiB of the 4,512 MiB" in line] == said
        assert len(said) == 1
        assert over.poll() is None

    def test_an_admin_may_have_it_ended(
        self, over: subprocess.Popen[bytes], alice: Allocation, settings: Settings, node: Node
    ) -> None:
        ending = replace(settings, slicing=replace(settings.slicing, over_grant="end", over_grant_after_s=60.0))
        neighbour = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        node.hold(0, pid=neighbour.pid, memory_mib=30000)
        assert over.stdout
        now = alice.since

        self.patrolled(ending, now + 20)
        self.patrolled(ending, now + 79)
        warned = over.poll()
        self.patrolled(ending, now + 80)
        told = over.stdout.readline()
        self.patrolled(ending, now + 90)

        assert (warned, told) == (None, b"told\n")
        assert over.wait() == -9
        assert neighbour.poll() is None
        neighbour.communicate()

    def test_one_that_is_back_within_it_begins_anew(
        self, over: subprocess.Popen[bytes], alice: Allocation, settings: Settings, node: Node
    ) -> None:
        ending = replace(settings, slicing=replace(settings.slicing, over_grant="end", over_grant_after_s=60.0))
        self.patrolled(ending, alice.since + 20)
        node.let_go(0, pid=over.pid)
        self.patrolled(ending, alice.since + 70)
        node.hold(0, pid=over.pid, memory_mib=5000)

        self.patrolled(ending, alice.since + 100)

        (record,) = Store(ending, machine.boot_id(settings.simulator)).read().records
        assert isinstance(record, Allocation)
        assert record.over_since == alice.since + 100
        assert over.poll() is None

    def test_it_is_shown(self, over: subprocess.Popen[bytes], node: Node, settings: Settings) -> None:
        keep = settings.slicing
        text = f'slices = "*"\nhami_core = "{keep.hami_core}"\nkeep_umask = "{keep.keep_umask}"\n'
        Path(node.store.folder, "config.toml").write_text(text)

        ran, plain = run(node, "police", "--once"), run(node, "police", "--once", "--json").plain

        where = f"on {node.uuids[0]}, isolation=cooperative"
        assert ran.out == f"manual:alice: 4,612 MiB of 4,512 MiB {where}: uses more than it was given\n"
        assert plain["slices"][0]["pids"] == [over.pid]
        assert plain["slices"][0]["measure"] == "warn"


def test_what_keeps_the_umask_is_built_by_the_command(tmp_path: Path) -> None:
    ran = run_command("slices", "build", tmp_path / "new" / "keep_umask.so")

    assert ran.code == 0
    assert (tmp_path / "new" / "keep_umask.so").stat().st_mode & 0o777 == 0o755


def test_where_there_is_no_compiler_that_is_said(tmp_path: Path) -> None:
    ran = run_command("slices", "build", tmp_path / "keep_umask.so", PATH="/nowhere")

    assert (ran.code, "there is no C compiler" in ran.err) == (4, True)


def test_a_notebook_kernel_is_held_to_its_slice(alice: Allocation, tmp_path: Path) -> None:
    """A real kernel, started by a real kernel manager with the environment it is to have."""
    client = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    env = answers.added(answers.environment(alice), {"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    file = tmp_path / "from-a-cell"
    cells = f"{PROGRAM}open({str(file)!r}, 'w').close()\nprint(total.value >> 20, taken)"
    manager, former = client.KernelManager(kernel_name="python3"), os.umask(0o027)
    manager.start_kernel(env=env)
    os.umask(former)
    said: list[str] = []
    try:
        kernel = manager.client()
        kernel.start_channels()
        kernel.wait_for_ready(timeout=60)
        kernel.execute_interactive(
            cells, timeout=60, output_hook=lambda message: said.append(message["content"].get("text", ""))
        )
        kernel.stop_channels()
    finally:
        manager.shutdown_kernel(now=True)

    assert "".join(said).strip() == "4000 4000"
    assert file.stat().st_mode & 0o777 == 0o640
