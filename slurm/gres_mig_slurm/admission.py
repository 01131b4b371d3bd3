"""What keeps jobs without a place from starting, on a node that is set up: as its file or its cluster has it."""

from __future__ import annotations

from gres_mig import config_text
from gres_mig.models import Settings
from gres_mig.values import replace
from gres_mig_slurm import gate_lines, wanted
from gres_mig_slurm.conf_lines import Conf
from gres_mig_slurm.files import File, planned

_TOPOLOGIES = ("tree", "block")
"""With these placeholders have to be in the topology's own file as well."""


def chosen(conf: Conf, settings: Settings) -> File | None:
    """The configuration as it says it from now on; None where nothing has to be said.

    A cluster that is new to migmem gets gates (docs/slurm-admission.md has the figures), one that has them goes on
    with them, and so does one that only counts. What a person has written down stays.
    """
    # Only instances have gates: there are features for the sizes of profiles, and a slice has any size.
    if not conf.texts or not settings.managed or not _wants_gates(conf):
        return None
    file = planned(settings.config_path, "")
    if file.before is None or config_text.says(file.before, "admission"):
        return None
    return replace(file, text=config_text.saying(file.before, "admission", "gates"))


def _wants_gates(conf: Conf) -> bool:
    if gate_lines.placeholders(conf):
        return True
    counts = any(wanted.counted_mib(line.get("Gres") or "") is not None for line in conf.of_kind("NodeName"))
    topology = conf.value("TopologyPlugin").lower().rpartition("/")[2]
    return not (counts or topology in _TOPOLOGIES or conf.value("NodeFeaturesPlugins"))
