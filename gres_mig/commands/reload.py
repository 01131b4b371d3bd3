"""`gres-mig reload`: has the running service read its configuration again, and says how that went."""

from __future__ import annotations

import os
import signal
import time

import click

from gres_mig import presence
from gres_mig.answers import emit, for_root
from gres_mig.cli import Node, json_option, pass_node
from gres_mig.errors import BadRequest, ConfigError, NodeFault
from gres_mig.presence import Presence

_PATIENCE_S = 10.0
_PAUSE_S = 0.02


@click.command()
@json_option
@pass_node
def reload(node: Node, as_json: bool) -> None:
    """Put a changed configuration into force in the running service; a wrong one is refused, and the old one stays."""
    # Read here first: what is wrong with it is told without troubling the service.
    settings = for_root(node.settings, "reload")
    before = presence.running(settings.run_dir)
    if before is None:
        raise BadRequest("no service runs on this node", hint="run: systemctl start gres-mig")
    os.kill(before.pid, signal.SIGHUP)
    after = _answer(settings.run_dir, before)
    if after.error:
        raise ConfigError(f"the service keeps the configuration it had: {after.error}")
    same = " (it had not changed)" if after.sha256 == before.sha256 else ""
    plain = {"pid": after.pid, "config": after.config, "sha256": after.sha256 or None, "loaded": after.loaded}
    emit(plain, f"in force in the service (pid {after.pid}): {after.config}{same}", as_json=as_json)


def _answer(run_dir: str, before: Presence) -> Presence:
    """What the service says once it has read the file."""
    ends = time.monotonic() + _PATIENCE_S
    while time.monotonic() < ends:
        after = presence.running(run_dir)
        if after is not None and (after.pid, after.tries) != (before.pid, before.tries):
            return after
        time.sleep(_PAUSE_S)
    raise NodeFault(
        f"the service (pid {before.pid}) did not read its configuration within {_PATIENCE_S:g} s",
        hint="run: systemctl restart gres-mig",
        code="TIMEOUT",
    )
