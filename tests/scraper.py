"""A program that reads a job mapping as dcgm-exporter does, over and over, until its input ends.

At each scrape it lists the folder, looks at each entry, and opens what is named like a GPU or a GPU instance; as in the
exporter, a file that cannot be opened fails the scrape. It prints one JSON line for each scrape that differs from the
one before: when it began and ended, and whose ids it saw. The last line says how many there were.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
import time


def scrape(folder: str) -> dict[str, list[str]]:
    """The ids by file; `OSError` where the exporter would answer with one."""
    names = []
    for entry in os.scandir(folder):
        try:
            entry.stat()
        except OSError:
            # The exporter passes over what went away this early; what it keeps, it opens.
            continue
        if not entry.is_dir() and re.fullmatch(r"\d+(\.\d+)?", entry.name):
            names.append(entry.name)
    found = {}
    for name in names:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            found[name] = file.read().split("\n")[:-1]
    return found


def main() -> None:
    """Scrape the folder that the first argument names."""
    # So that on a machine of few cores there is something to be seen.
    os.nice(5)
    number, last = 0, None
    while not select.select([sys.stdin], [], [], 0)[0]:
        began = time.monotonic_ns()
        found = scrape(sys.argv[1])
        number += 1
        if found != last:
            print(json.dumps({"began": began, "ended": time.monotonic_ns(), "found": found}), flush=number == 1)
            last = found
    print(json.dumps({"scrapes": number}))


if __name__ == "__main__":
    main()
