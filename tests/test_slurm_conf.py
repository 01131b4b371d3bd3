"""What is read from slurm.conf without asking anybody."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gres_mig_slurm import slurm_conf

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
        ("Include more.conf", "/included"),
        ("include  more.conf\nSlurmdSpoolDir=/later", "/included"),
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
