"""Charts of the demo, as PNG files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

WITHOUT, INK, FAINT, LINE = "#d5d9df", "#343a40", "#e9ecef", "#adb5bd"
COLORS = {"ram": "#0b7285", "ssd": "#e8920c", "computed": "#7d8794"}
SHOWN = {"ram": "RAM", "ssd": "SSD", "computed": "computed"}
BAR_WIDTH = 0.42


class Sources(NamedTuple):
    """Where the KV of a prompt's tokens came from; together they are the prompt."""

    ram: int
    ssd: int
    computed: int

    @property
    def main(self) -> str:
        """Query. The field with most of the tokens."""
        return max(self._fields, key=lambda name: getattr(self, name))


class Pair(NamedTuple):
    """TTFT of one turn, without and with the service."""

    label: str
    cold_ms: float
    warm_ms: float
    sources: Sources


def ttft_chart(
    path: Path, turns: Sequence[Pair], restarts: Sequence[Pair], *, groups: Sequence[str], per_group: int
) -> None:
    """Changes state: writes `path`. `turns` in order of arrival, in `groups` of `per_group`; above TTFT, below where
    the prompts' tokens came from."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(12.5, 6.2), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex="col", sharey="row", width_ratios=(3, 1), height_ratios=(1.7, 1))
    for column, pairs in enumerate((turns, restarts)):
        _times(axes[0, column], pairs)
        _stacks(axes[1, column], pairs)
    for row in axes[:, 0]:
        _group_lines(row, len(turns), per_group)
    _ticks(axes[1, 0], [at * per_group + (per_group - 1) / 2 for at in range(len(groups))], groups)
    _ticks(axes[1, 1], range(len(restarts)), [pair.label.replace(" ", "\n", 1) for pair in restarts])
    _titles(axes)
    axes[0, 0].set_ylim(0, 1.1 * max(max(pair.cold_ms, pair.warm_ms) for pair in (*turns, *restarts)) / 1000)
    axes[1, 0].set_ylim(0, 1.04 * max(sum(pair.sources) for pair in (*turns, *restarts)))
    _legend(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _times(axes: Any, pairs: Sequence[Pair]) -> None:
    """The bar of the service has the colour of the tier that most of the prompt came from."""
    places = range(len(pairs))
    axes.bar([at - BAR_WIDTH / 2 for at in places], [pair.cold_ms / 1000 for pair in pairs], BAR_WIDTH, color=WITHOUT)
    axes.bar(
        [at + BAR_WIDTH / 2 for at in places],
        [pair.warm_ms / 1000 for pair in pairs],
        BAR_WIDTH,
        color=[COLORS[pair.sources.main] for pair in pairs],
    )
    for at, pair in enumerate(pairs):
        seconds = pair.warm_ms / 1000
        axes.annotate(f"{seconds:.2f}", (at, seconds), (1, 1.5), textcoords="offset points", fontsize=7.5, color=INK)
    _plain(axes)


def _stacks(axes: Any, pairs: Sequence[Pair]) -> None:
    below = [0] * len(pairs)
    for name, color in COLORS.items():
        tokens = [getattr(pair.sources, name) for pair in pairs]
        axes.bar(range(len(pairs)), tokens, 2 * BAR_WIDTH, bottom=below, color=color)
        below = [low + high for low, high in zip(below, tokens, strict=True)]
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
    axes.tick_params(colors=INK, length=0)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)


def _group_lines(axes: Any, num_turns: int, per_group: int) -> None:
    for first in range(per_group, num_turns, per_group):
        axes.axvline(first - 0.5, color=FAINT, linewidth=1)


def _ticks(axes: Any, places: Sequence[float], labels: Sequence[str]) -> None:
    axes.set_xticks(places, labels, fontsize=9)


def _titles(axes: Any) -> None:
    axes[0, 0].set_title("every question, in order of arrival", loc="left", fontsize=10.5, color=INK)
    axes[0, 1].set_title("two restarts of the daemon", loc="left", fontsize=10.5, color=INK)
    axes[0, 0].set_ylabel("time to first token [s]", color=INK)
    axes[1, 0].set_ylabel("prompt tokens", color=INK)
    axes[1, 0].yaxis.set_major_formatter("{x:,.0f}")


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=WITHOUT, label="without the service")]
    patches += [
        Patch(color=color, label=f"with it, prompt {'' if name == 'computed' else 'from '}{SHOWN[name]}")
        for name, color in COLORS.items()
    ]
    figure.legend(handles=patches, loc="outside upper left", ncols=4, fontsize=10, frameon=False, labelcolor=INK)
