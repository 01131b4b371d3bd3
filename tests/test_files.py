"""Files that others look into: their folders can be entered, their modes are as asked, a copy never covers another."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gres_mig import files


@pytest.fixture(autouse=True)
def _closed_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_can_be_entered_whatever_the_umask_is(tmp_path: Path) -> None:
    files.make_folder(str(tmp_path / "a" / "b" / "c"), 0o750)

    assert [mode(tmp_path / path) for path in ("a", "a/b", "a/b/c")] == [0o755, 0o755, 0o750]


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(0o700)

    files.make_folder(str(tmp_path / "a"))

    assert mode(tmp_path / "a") == 0o700


def test_a_file_is_replaced_whole_with_its_mode_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "config.toml"
    files.replace_whole(str(path), "old\n")
    with path.open(encoding="utf-8") as reader:
        files.replace_whole(str(path), "new\n", 0o640)

        seen_by_a_reader = reader.read()

    assert (seen_by_a_reader, path.read_text()) == ("old\n", "new\n")
    assert mode(path) == 0o640
    assert os.listdir(path.parent) == ["config.toml"]


def test_two_copies_of_one_second_are_two_files(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("first")
    one = files.keep_copy(str(path))
    path.write_text("second")

    two = files.keep_copy(str(path))

    assert [Path(kept).read_text() for kept in (one, two)] == ["first", "second"]


def test_a_link_in_the_place_of_the_new_file_is_not_followed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("kept")
    (tmp_path / f"config.toml.{os.getpid()}").symlink_to(theirs)

    with pytest.raises(OSError, match="symbolic links"):
        files.replace_whole(str(tmp_path / "config.toml"), "new\n")

    assert theirs.read_text() == "kept"
