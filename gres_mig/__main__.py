"""The command `gres-mig`: the two commands that hooks run go the quick way, all others through click."""

from __future__ import annotations

import sys
from collections.abc import Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; exit code 0 done, 2 request, 3 capacity, 4 node."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not {"allocate", "reclaim"}.isdisjoint(given):
        from gres_mig import answers, quick
        from gres_mig.errors import GresMigError

        if (understood := quick.parse(given)) is not None:
            try:
                quick.run(understood)
            except GresMigError as error:
                answers.fail(error, as_json=understood.as_json)
            sys.exit(0)
    from gres_mig import cli

    cli.main(given)


if __name__ == "__main__":
    main()
