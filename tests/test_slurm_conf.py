"""What is read from slurm.conf without asking anybody is what Slurm's own daemons read from it."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, brought_up, require_slurm

from gres_mig.errors import ConfigError
from gres_mig_slurm import conf_lines, slurm_conf

HOST = socket.gethostname().partition(".")[0]


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The slurm.conf that SLURM_CONF names."""
    file = tmp_path / "slurm.conf"
    monkeypatch.setenv("SLURM_CONF", str(file))
    return file


@pytest.mark.parametrize(
    ("text", "spool"),
    [
        ("SlurmdSpoolDir=/var/spool/slurm", "/var/spool/slurm"),
        ("slurmdspooldir = /var/spool/slurm.%n  # one a node", "/var/spool/slurm.n7"),
        ("SlurmdSpoolDir=/var/spool/%h/%n", f"/var/spool/{HOST}/n7"),
        ("#SlurmdSpoolDir=/elsewhere\nClusterName=lab", "/var/spool/slurmd"),
        ("SlurmdSpoolDir=/first\nSlurmdSpoolDir=/last", "/last"),
        ("Include more.conf", "/included"),
        ("include  more.conf\nSlurmdSpoolDir=/later", "/later"),
        ("", "/var/spool/slurmd"),
    ],
)
def test_the_folder_of_the_step_daemons_is_as_slurm_reads_it(conf: Path, text: str, spool: str) -> None:
    conf.write_text(text)
    (conf.parent / "more.conf").write_text("SlurmdSpoolDir=/included\n")

    assert slurm_conf.spool_dir("n7") == spool


def test_a_node_without_a_name_goes_by_its_host(conf: Path) -> None:
    conf.write_text("SlurmdSpoolDir=/spool.%n\n")

    assert slurm_conf.spool_dir() == f"/spool.{HOST}"


def test_files_that_include_each_other_end(conf: Path) -> None:
    conf.write_text("Include slurm.conf\n")

    assert slurm_conf.spool_dir() == "/var/spool/slurmd"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", 121), ("AuthInfo=socket=/run/munge/s,cred_expire=30", 31), ("AuthInfo=cred_expire=5", 6)],
)
def test_a_requeued_job_waits_a_second_longer_than_a_credential_is_good_for(
    conf: Path, text: str, seconds: int
) -> None:
    conf.write_text(text)

    assert slurm_conf.requeue_delay_s() == seconds


def test_no_slurm_conf_means_slurms_defaults(conf: Path) -> None:
    assert not conf.exists()
    assert (slurm_conf.spool_dir(), slurm_conf.requeue_delay_s()) == ("/var/spool/slurmd", 121)


def test_what_cannot_be_read_stops_no_hook_and_stops_who_would_change_it(conf: Path) -> None:
    conf.write_text("AuthInfo=cred_expire=30\nInclude missing.conf\nSlurmdSpoolDir=/spool\n")

    assert (slurm_conf.spool_dir(), slurm_conf.requeue_delay_s()) == ("/spool", 31)
    with pytest.raises(ConfigError, match=r"missing\.conf: it is included, but not there"):
        conf_lines.read(str(conf))


@pytest.mark.parametrize(
    ("written", "changed"),
    [
        ("Epilog=/old", "Epilog=/new"),
        ("  epilog = /old  # theirs", "  epilog = /new  # theirs"),
        ("Epilog=/old\\\n/longer", "Epilog=/new"),
        ("Epilog=\\\n/old", "Epilog=/new"),
        ('Epilog="/old one" # "', 'Epilog=/new # "'),
        (r"Epilog=/old\#1 # theirs", "Epilog=/new # theirs"),
        ("NodeName=n1 Epilog=/old \\\n CPUs=2", "NodeName=n1 Epilog=/new \\\n CPUs=2"),
        ("NodeName=n1 Epilog=/old\\\n CPUs=2", "NodeName=n1 Epilog=/new\\\n CPUs=2"),
        ("NodeName=n1 \\\n CPUs=2 # theirs", "NodeName=n1 \\\n CPUs=2 Epilog=/new  # theirs"),
    ],
)
def test_one_value_of_a_line_changes_and_all_else_stays(conf: Path, written: str, changed: str) -> None:
    conf.write_text(f"ClusterName=lab\n{written}\nMailProg=/bin/true\n")
    read = conf_lines.read(str(conf))

    texts = conf_lines.changed(read, {read.lines[1]: read.lines[1].with_value("Epilog", "/new")})

    assert texts == {str(conf): f"ClusterName=lab\n{changed}\nMailProg=/bin/true\n"}


# As the daemons read it

ODD = (
    r"""
HealthCheckProgram=/first
HealthCheckProgram=/last
srunprolog=/before
  SRUNEPILOG = /lower   # comment
Include more.conf
include	again.conf
Include again.conf
Include %c.conf
TaskEpilog="/with space/x"
SuspendProgram=/continued\
/here
ResumeProgram=/a # comment \
UnkillableStepProgram=/after-it
LaunchParameters=a\#b
ResumeFailProgram=\  """
    r"""
/after-blanks
RebootProgram=/two\\
MailDomain =	by.tabs#comment
MaxArraySize=77\
 # a comment alone
AuthInfo=socket={folder}/munge/socket,cred_expire=77
AuthInfo=socket={folder}/munge/socket,cred_expire=7
"""
)


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, dict[str, str]]]:
    """A cluster whose slurm.conf is as odd as Slurm lets it be, and what `scontrol show config` says of it."""
    require_slurm()
    with brought_up(request, {"n1": [("rtx-pro-6000", 1)]}, hooks=False) as cluster:
        etc = cluster.conf.parent
        (etc / "deep").mkdir()
        (etc / "more.conf").write_text("SrunEpilog=/included\nInclude deep/deep.conf\n")
        (etc / "deep" / "deep.conf").write_text("Include beside.conf\n")
        (etc / "deep" / "beside.conf").write_text("PrologSlurmctld=/bin/true\n")
        (etc / "beside.conf").write_text("PrologSlurmctld=/bin/false\n")
        (etc / "again.conf").write_text("SrunProlog=/again\n")
        (etc / "lab.conf").write_text("EpilogSlurmctld=/bin/true\n")
        cluster.reconfigure(ODD.replace("{folder}", str(cluster.folder)).replace("{blanks}", " \t"))
        shown = cluster.scontrol("show", "config")
        # 24.11 numbers those of which there may be several.
        yield cluster, dict(re.findall(r"(?m)^(\w+?)(?:\[0\])? *= (.*?) *$", shown))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("HealthCheckProgram", "/last"),
        ("SrunProlog", "/again"),
        ("SrunEpilog", "/included"),
        ("PrologSlurmctld", "/bin/true"),
        ("EpilogSlurmctld", "/bin/true"),
        ("TaskEpilog", "/with space/x"),
        ("SuspendProgram", "/continued/here"),
        ("ResumeProgram", "/a"),
        ("UnkillableStepProgram", "/after-it"),
        ("LaunchParameters", "a#b"),
        ("ResumeFailProgram", "/after-blanks"),
        ("RebootProgram", "/two\\"),
        ("MailDomain", "by.tabs"),
        ("MaxArraySize", "77"),
    ],
)
def test_a_line_however_odd_says_what_the_daemons_take_it_for(
    told: tuple[Cluster, dict[str, str]], key: str, value: str
) -> None:
    cluster, running = told
    if key == "PrologSlurmctld" and "PrologSlurmctld[0]" in cluster.scontrol("show", "config"):
        # 24.11 looks for what an included file includes beside slurm.conf, 22.05 beside that file; we as 22.05.
        assert running[key] == "/bin/false"
        return

    assert running[key] == value
    assert conf_lines.read(str(cluster.conf)).value(key) == value


def test_a_hook_goes_by_what_the_daemons_go_by(
    told: tuple[Cluster, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, running = told
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))

    assert running["AuthInfo"].endswith(",cred_expire=7")
    assert slurm_conf.requeue_delay_s() == 8
    assert running["SlurmdSpoolDir"].replace("%n", "n1") == slurm_conf.spool_dir("n1")
