"""The figures as Markdown: the same on the terminal and in the docs."""

from __future__ import annotations

from collections.abc import Sequence

from simulation import OPTIMUM, Row, Timing


def markdown(rows: Sequence[Row], timings: Sequence[Timing], first_us: float) -> str:
    """Accepted shares by row, then decision times."""
    lines: list[str] = []
    for model in dict.fromkeys(row.model for row in rows):
        found = [row for row in rows if row.model == model]
        policies = [policy for policy in found[0].shares if policy != OPTIMUM]
        head = ["GPUs", "mix", *policies, "optimum (exact)", "gres-mig, % of optimum", "gres-mig over HAMi binpack"]
        lines += [f"**{model}**: accepted slices, % of offered", "", *_header(head)]
        for row in found:
            shares = [f"{row.share(policy):.1f}" for policy in policies]
            exact = "" if row.optimum is None else f"{100 * row.optimum:.2f}"
            ratio = "" if row.of_optimum is None else f"{row.of_optimum:.2f}"
            gain, error = row.over_hami
            lines.append(_line([str(row.gpus), row.mix, *shares, exact, ratio, f"{gain:+.2f} ± {error:.2f}"]))
        lines.append("")
    lines += ["**One decision** (A100, uniform, refusals included), µs", "", *_header(["GPUs", "p50", "p99"])]
    lines += [_line([str(t.gpus), f"{t.p50:.0f}", f"{t.p99:.0f}"]) for t in timings]
    lines += ["", f"The first and only decision of a process, 8 GPUs: {first_us:,.0f} µs.", ""]
    return "\n".join(lines)


def _header(names: Sequence[str]) -> list[str]:
    return [_line(names), _line(["---"] * len(names))]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
