"""The figures as pictures in the docs; the only part of the benches that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from policies import POLICIES
from simulation import HAMI, MIXES, OPTIMUM, OURS, Row, Timing

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
STYLE = {
    OURS: ("#1a7f37", "o"),
    HAMI: ("#0969da", "s"),
    "lowest-start binpack": ("#8250df", "^"),
    "first-fit": ("#bf8700", "v"),
    "random": ("#6e7781", "x"),
    "HAMi 2.10 spread (its default)": ("#cf222e", "D"),
}


def renew(folder: Path, rows: Sequence[Row], timings: Sequence[Timing], tables: str) -> None:
    """Write the plots and put `tables` between the marks of `placement.md`."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
    plt.rcParams.update({"grid.alpha": 0.3, "savefig.dpi": 110, "savefig.bbox": "tight"})
    _accepted(rows, folder / "placement-accepted.png")
    _optimum(rows, folder / "placement-optimum.png")
    _scale(rows, folder / "placement-scale.png")
    _time(timings, folder / "placement-time.png")
    page = folder / "placement.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}", encoding="utf-8")


def _accepted(rows: Sequence[Row], path: Path) -> None:
    models = ("A100", "RTX PRO 6000", "H200, no allow-list")
    figure, axes = plt.subplots(1, len(models), figsize=(13, 4.4), sharey=True)
    for axis, model in zip(axes, models, strict=True):
        by_mix = {row.mix: row for row in rows if row.model == model and row.gpus == 8}
        for i, policy in enumerate(POLICIES):
            colour, marker = STYLE[policy]
            places = [m + (i - 2.5) * 0.13 for m in range(len(MIXES))]
            shares = [by_mix[mix].share(policy) for mix in MIXES]
            axis.plot(places, shares, marker, color=colour, label=policy, markersize=6)
        axis.set_xticks(range(len(MIXES)), list(MIXES))
        axis.grid(axis="x", visible=False)
        axis.set_title(f"8 x {model}")
    axes[0].set_ylabel("accepted slices, % of offered (load 0.9)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=6, loc="lower center", bbox_to_anchor=(0.5, -0.07), frameon=False)
    _save(figure, path)


def _optimum(rows: Sequence[Row], path: Path) -> None:
    shown = {"A100": "A100", "RTX PRO 6000": "RTX PRO 6000", "H200, no allow-list": "H200, no list"}
    solved = [row for row in rows if row.of_optimum is not None and row.model in shown]
    groups = list(dict.fromkeys((row.model, row.gpus) for row in solved))
    figure, axis = plt.subplots(figsize=(13, 4.4))
    lowest = 100.0
    for policy in (HAMI, "lowest-start binpack", OURS):
        colour, marker = STYLE[policy]
        places, ratios = [], []
        for row in solved:
            places.append(groups.index((row.model, row.gpus)) + (list(MIXES).index(row.mix) - 2) * 0.15)
            ratios.append(100 * row.share(policy) / row.share(OPTIMUM))
        lowest = min(lowest, *ratios)
        axis.plot(places, ratios, marker, color=colour, label=policy, markersize=6, alpha=0.85)
    for g in range(len(groups)):
        for m, mix in enumerate(MIXES):
            axis.annotate(mix, (g + (m - 2) * 0.15, lowest - 2.2), rotation=90, fontsize=7, ha="center", va="bottom")
    axis.axhline(100, color="black", linewidth=1)
    axis.set_ylim(lowest - 2.3, 100.6)
    axis.set_xlim(-0.5, len(groups) - 0.5)
    axis.grid(axis="x", visible=False)
    axis.set_xticks(range(len(groups)), [f"{gpus} x\n{shown[model]}" for model, gpus in groups])
    axis.set_ylabel("% of the exact optimum, same arrivals")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, -0.32), ncols=3, frameon=False)
    _save(figure, path)


def _scale(rows: Sequence[Row], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, mix in zip(axes, ("nofull", "uniform"), strict=True):
        found = [row for row in rows if row.model == "A100" and row.mix == mix]
        numbers = [row.gpus for row in found]
        for policy in POLICIES:
            colour, marker = STYLE[policy]
            axis.plot(
                numbers, [row.share(policy) for row in found], f"{marker}-", color=colour, label=policy, markersize=5
            )
        solved = [row for row in found if row.optimum is not None]
        exact = [100 * (row.optimum or 0) for row in solved]
        axis.plot([row.gpus for row in solved], exact, "k_", markersize=14, label="optimum (exact)")
        axis.set_xscale("log", base=2)
        axis.set_xticks(numbers, [str(n) for n in numbers])
        axis.minorticks_off()
        axis.set_xlabel("GPUs")
        axis.set_title(f"A100, {mix}, load 0.9")
    axes[0].set_ylabel("accepted slices, % of offered")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, loc="lower center", bbox_to_anchor=(0.5, -0.13), frameon=False)
    _save(figure, path)


def _time(timings: Sequence[Timing], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(6, 4))
    numbers = [t.gpus for t in timings]
    axis.plot(numbers, [t.p99 for t in timings], "s--", color="#57606a", label="p99")
    axis.plot(numbers, [t.p50 for t in timings], "o-", color="#1a7f37", label="p50")
    axis.plot([8], [200], "_", color="#cf222e", markersize=22, markeredgewidth=2, label="limit for p99 at 8 GPUs")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(numbers, [str(n) for n in numbers])
    axis.set_yticks([5, 10, 20, 50, 100, 200, 500], ["5", "10", "20", "50", "100", "200", "500"])
    axis.minorticks_off()
    axis.set_xlabel("GPUs")
    axis.set_ylabel("one decision, µs")
    axis.legend(frameon=False, loc="lower right")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    # No version of matplotlib in the file: the same figures give the same picture.
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
