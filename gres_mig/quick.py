"""`allocate` and `reclaim` without what the rest of the command line imports; hooks run them at every job.

It knows the plain forms of the two commands only. Whatever else is there, an error too, is left to click, which
knows the same options; tests/test_quick.py holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gres_mig import answers, config, machine
from gres_mig.deadline import operate
from gres_mig.errors import BadRequest
from gres_mig.models import Process, Request, Settings
from gres_mig.owners import parse_owner
from gres_mig.sizes import parse_memory

_VALUES = {
    "": ("--node", "--config", "--name"),
    "allocate": ("--owner", "--memory", "--profile", "--gpu", "--witness", "--isolation"),
    "reclaim": (),
}


class Arguments:
    """What a command line names: values by option, words without one, and whether JSON is wanted."""

    def __init__(self) -> None:
        self.command = ""
        self.values: dict[str, list[str]] = {}
        self.words: list[str] = []
        self.as_json = False

    def last(self, option: str) -> str | None:
        """The option's value; the last one given counts, as in click."""
        return self.values[option][-1] if option in self.values else None

    def settings(self) -> Callable[[], Settings]:
        """The node's configuration, to be read when all else is found to be right."""
        node, file, name = (self.last(option) for option in _VALUES[""])
        return lambda: config.load(file, node=node, name=name or "")


def parse(given: Sequence[str]) -> Arguments | None:
    """The command line, if it is a plain `allocate` or `reclaim OWNER`; None leaves it to click."""
    arguments = Arguments()
    rest = list(given)
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if option in _VALUES[arguments.command]:
            if not equals and not rest:
                return None
            arguments.values.setdefault(option, []).append(value if equals else rest.pop(0))
        elif word == "--json" and arguments.command:
            arguments.as_json = True
        elif word.startswith("-"):
            return None
        elif not arguments.command:
            if word not in _VALUES or not word:
                return None
            arguments.command = word
        else:
            arguments.words.append(word)
    wanted = {"allocate": 0, "reclaim": 1}.get(arguments.command)
    return arguments if wanted == len(arguments.words) else None


def run(arguments: Arguments) -> None:
    """Do it; errors are the caller's to show."""
    if arguments.command == "allocate":
        allocate(
            arguments.settings(),
            arguments.last("--owner"),
            arguments.last("--memory"),
            arguments.last("--profile"),
            tuple(arguments.values.get("--gpu", ())),
            tuple(arguments.values.get("--witness", ())),
            arguments.last("--isolation"),
            as_json=arguments.as_json,
        )
    else:
        (owner,) = arguments.words
        reclaim(arguments.settings(), owner, as_json=arguments.as_json)


def allocate(
    settings: Callable[[], Settings],
    owner: str | None,
    memory: str | None,
    profile: str | None,
    gpus: tuple[str, ...],
    witnesses: tuple[str, ...],
    isolation: str | None,
    *,
    as_json: bool,
) -> None:
    """Give an owner the smallest instance that holds what it asks for, and print it; it ends with its witnesses."""
    if owner is None:
        raise BadRequest("nobody was named to allocate for", hint="such as: --owner manual:alice")
    if (memory is None) == (profile is None):
        raise BadRequest("ask for a memory size or for a profile, one of the two", hint="such as: --memory 8000")
    if isolation not in (None, "mig"):
        raise BadRequest(f"isolation {isolation!r}: only mig can be insisted on", hint="write --isolation mig, or none")
    who = parse_owner(owner)
    request = Request(0 if memory is None else parse_memory(memory), profile or "", gpus, isolation or "")
    node = answers.for_root(settings(), "allocate", or_delegate=True)
    lives = tuple(_process(pid) for pid in witnesses)
    grant = operate(node, lambda allocator: allocator.allocate(who, request, witnesses=lives))
    text = answers.describe(grant.allocation) + ("" if grant.created else " (already)")
    answers.emit(answers.plain_allocation(grant.allocation, created=grant.created), text, as_json=as_json)


def reclaim(settings: Callable[[], Settings], owner: str, *, as_json: bool) -> None:
    """Take back what an owner has, and print what became of it."""
    who = parse_owner(owner)
    node = answers.for_root(settings(), "reclaim", or_delegate=True)
    outcomes = operate(node, lambda allocator: allocator.reclaim(who))
    answers.emit_outcomes(outcomes, f"{owner} holds nothing", as_json=as_json)


def _process(pid: str) -> Process:
    number = int(pid) if pid.isascii() and pid.isdigit() and len(pid) < 10 else 0
    found = machine.process(number) if number else None
    if found is None:
        raise BadRequest(f"witness {pid!r}: there is no such process", hint="name one that runs, by its pid")
    return found
