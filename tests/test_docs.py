"""What the documentation says: every command, every error, and examples that answer as shown."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from command_line import here

from gres_mig import cli
from gres_mig.simulator import assembly, physics
from gres_mig.simulator.program import environment

ROOT = Path(__file__).parent.parent
DOCS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.exists()]
TEXT = "\n".join(path.read_text() for path in DOCS)
RUNS = re.compile(r"\$ gres-mig (?:--node|simulate (?:create|boards)) ")


def commands(group: click.Group, path: str) -> Iterator[str]:
    """Every command below a group, as it is typed."""
    context = click.Context(group)
    for name in group.list_commands(context):
        yield f"{path} {name}"
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")


def codes() -> set[str]:
    """Every error code in the source: of the classes, and where one is raised with another."""
    found = set()
    for module in (ROOT / "gres_mig").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            value = node.value if isinstance(node, (ast.keyword, ast.Assign)) and "code" in _names(node) else None
            # A choice of two codes has them as its parts.
            parts = [part.value for part in ast.walk(value) if isinstance(part, ast.Constant)] if value else []
            found |= {part for part in parts if isinstance(part, str) and part.isupper()}
    return found


def _names(node: ast.keyword | ast.Assign) -> list[str | None]:
    if isinstance(node, ast.keyword):
        return [node.arg]
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def blocks(path: Path) -> Iterator[list[tuple[str, list[str]]]]:
    """The commands of each block of the text, with what it says they print."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE):
        examples: list[tuple[str, list[str]]] = []
        for line in block.splitlines():
            if line.startswith("$ "):
                examples.append((line[2:], []))
            elif examples:
                examples[-1][1].append(line)
        if examples:
            yield examples


@pytest.mark.parametrize("command", sorted(commands(cli.gres_mig, "gres-mig")))
def test_every_command_is_documented(command: str) -> None:
    assert re.search(rf"(?<!\w){re.escape(command)}(?!\w)", TEXT)


@pytest.mark.parametrize("code", sorted(codes()))
def test_every_error_code_is_documented(code: str) -> None:
    assert f"`{code}`" in TEXT


def test_codes_are_found_where_they_are() -> None:
    """The two tests above would pass on nothing."""
    assert {"BADREQ", "NOCAP", "FRAG", "GPULOST", "CONFIG", "ENDED"} <= codes()
    assert {"gres-mig allocate", "gres-mig simulate reboot"} <= set(commands(cli.gres_mig, "gres-mig"))


class Shell:
    """Runs a document's examples: its /tmp/node is a folder of the test, where GPUs have other UUIDs."""

    def __init__(self, folder: Path) -> None:
        self._bin, self._nodes = folder / "bin", folder / "nodes"
        self._bin.mkdir()
        self._nodes.mkdir()
        script = self._bin / "gres-mig"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gres_mig "$@"\n')
        script.chmod(0o755)
        self._names: dict[str, str] = {}

    def run(self, line: str) -> str:
        """What it prints, said as the document says it."""
        for node in re.findall(r"(?:--node|simulate [a-z]+) (/\S+)", line):
            self._know(node)
        for said, real in self._names.items():
            line = line.replace(said, real)
        text = self._in_a_shell(line) if re.search(r"[<>&|;$]|^(?!gres-mig )", line) else self._here(line)
        for said, real in self._names.items():
            text = text.replace(real, said)
        return text

    def _here(self, line: str) -> str:
        answer = here(*shlex.split(line)[1:])
        return answer.out + answer.err

    def _in_a_shell(self, line: str) -> str:
        variables = environment()
        variables["PATH"] = f"{self._bin}:{variables['PATH']}"
        words = ["sh", "-c", line]
        done = subprocess.run(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        return done.stdout.decode()

    def _know(self, node: str) -> None:
        if node in self._names:
            return
        real = str(self._nodes / f"node{len(self._names)}")
        for index in range(8):
            said_gpu, real_gpu = assembly.gpu_uuid(node, index), assembly.gpu_uuid(real, index)
            self._names[said_gpu] = real_gpu
            for gi_id in range(15):
                self._names[physics.mig_uuid(said_gpu, gi_id, 0)] = physics.mig_uuid(real_gpu, gi_id, 0)
        self._names[node] = real


def as_pattern(lines: list[str]) -> str:
    """`…` in what a document shows stands for anything."""
    return ".*?".join(re.escape(part) for part in "\n".join(lines).split("…"))


EXAMPLES = [path for path in DOCS if any(RUNS.match(f"$ {line}") for block in blocks(path) for line, _ in block)]


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_examples_answer_as_the_document_says(memory: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(memory)
    monkeypatch.setenv("COLUMNS", "80")

    for block in blocks(path):
        for line, shown in block:
            if RUNS.match(f"$ {line}") or "/tmp/node" in line:
                said = shell.run(line)
                if not re.fullmatch(as_pattern(shown), said.rstrip("\n"), re.DOTALL):
                    pytest.fail("\n".join([f"{path.name} shows", f"$ {line}", *shown, "but it prints", said]))


def test_there_are_examples() -> None:
    assert {"commands.md", "simulator.md"} <= {path.name for path in EXAMPLES}
