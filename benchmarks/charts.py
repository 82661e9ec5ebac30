"""Charts of the demo and the benchmarks, as PNG files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

COLD, WARM, INK = "#c3c8d0", "#0b7285", "#343a40"
BAR_WIDTH = 0.42


class Pair(NamedTuple):
    """TTFT of one turn, without and with the service."""

    label: str
    cold_ms: float
    warm_ms: float


def ttft_chart(path: Path, turns: Sequence[Pair], outage: Sequence[Pair], *, per_turn: int) -> None:
    """Changes state: writes `path`. `turns` in order of arrival, `per_turn` conversations each turn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 4.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2.4, 1))
    _pairs(left, turns)
    _turn_bands(left, len(turns), per_turn)
    left.set_title(
        f"{per_turn} conversations, interleaved: every question in order of arrival", loc="left", fontsize=10
    )
    left.set_ylabel("time to first token [s]")
    left.legend(loc="upper right", facecolor="white", edgecolor="none", framealpha=1, ncols=2, fontsize=9)
    _pairs(right, outage)
    right.set_xticks(
        range(len(outage)),
        [pair.label.replace(", ", ",\n").replace("killed ", "killed\n") for pair in outage],
        fontsize=8,
    )
    right.set_title("the daemon is killed with SIGKILL and restarted", loc="left", fontsize=10)
    top = max(max(pair.cold_ms, pair.warm_ms) for pair in (*turns, *outage)) / 1000
    left.set_ylim(0, 1.18 * top)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _pairs(axes: Any, pairs: Sequence[Pair]) -> None:
    for offset, color, label, values in (
        (-BAR_WIDTH / 2, COLD, "without the service", [pair.cold_ms / 1000 for pair in pairs]),
        (BAR_WIDTH / 2, WARM, "with the service", [pair.warm_ms / 1000 for pair in pairs]),
    ):
        places = [index + offset for index in range(len(pairs))]
        bars = axes.bar(places, values, BAR_WIDTH, color=color, label=label)
        if color == WARM:
            axes.bar_label(bars, fmt="%.2f", fontsize=6.5, color=INK, padding=1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, length=0)
    axes.grid(axis="y", color="#e9ecef", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)


def _turn_bands(axes: Any, num_turns: int, per_turn: int) -> None:
    firsts = range(0, num_turns, per_turn)
    for first in firsts[1:]:
        axes.axvline(first - 0.5, color="#dee2e6", linewidth=1)
    axes.set_xticks([first + (per_turn - 1) / 2 for first in firsts], [f"turn {1 + at}" for at in range(len(firsts))])
