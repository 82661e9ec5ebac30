"""The demo: a real model answers six customers' chats without and with the service, then the service is killed.

    make demo       (or: python -m benchmarks.demo)

1. six conversations of four turns, interleaved, each answer computed from nothing
2. the same with `kvstore serve` beside the model: same words, a fraction of the time to first token (TTFT)
3. a second engine process goes on with two of the chats and hits what the first one stored
4. the daemon is killed in the middle of an answer: the chat goes on without it, and with it again when it is back

Everything is real: model, tensors, shared memory, ZeroMQ, processes. Nothing is left running or lying about.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import kvstore
from benchmarks import models, report
from benchmarks.charts import Pair, ttft_chart
from benchmarks.chats import CONVERSATIONS, LATER_QUESTIONS, Chat, interleaved
from benchmarks.daemon import Daemon, DaemonFailed, terminated_like_interrupted
from benchmarks.engine import Answer, answer_cached, answer_plain, torch_version
from connectors.transformers import CachedModel

ANSWER_TOKENS = 20
KILLED_AT_TOKEN = 3
GENERATION = {"repetition_penalty": 1.1}  # greedy all the same: without it so small a model repeats itself
CHART = Path("results") / "ttft_by_turn.png"
CAPACITY = "2GiB"
BACK_S_MAX = 30.0
ENGINE_S_MAX = 300.0

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """One question, answered twice from the same chat: without the service and with it."""

    label: str
    number: int
    cold: Answer
    warm: Answer

    @property
    def is_same(self) -> bool:
        return self.cold.token_ids == self.warm.token_ids

    @property
    def pair(self) -> Pair:
        return Pair(self.label, self.cold.ttft_ms, self.warm.ttft_ms)


class Engine:
    """The model, its tokenizer, and the two ways to answer."""

    def __init__(self, client: kvstore.Client) -> None:
        self.model, self.tokenizer = models.load()
        self._cached = CachedModel(self.model, client, name=models.NAME)

    def cold(self, prompt: Sequence[int]) -> Answer:
        return answer_plain(self.model, prompt, ANSWER_TOKENS, **GENERATION)

    def warm(self, prompt: Sequence[int], **options: Any) -> Answer:
        return answer_cached(self._cached, prompt, ANSWER_TOKENS, **GENERATION, **options)

    def words(self, answer: Answer) -> str:
        return str(self.tokenizer.decode(answer.generated, skip_special_tokens=True)).strip()


# The four parts


def play_script(
    engine: Engine, title: str, answer: Callable[[Sequence[int]], Answer]
) -> tuple[list[Chat], list[Answer]]:
    """Changes state. All conversations, interleaved, with one way to answer; the chats go on from here."""
    chats = [Chat(engine.tokenizer) for _ in CONVERSATIONS]
    answers = []
    order = list(interleaved(CONVERSATIONS))
    with _progress() as progress:
        task = progress.add_task(title, total=len(order), note="")
        for conversation, turn in order:
            made = answer(chats[conversation].ask(CONVERSATIONS[conversation].questions[turn]))
            chats[conversation].answered(made.token_ids)
            answers.append(made)
            progress.update(task, advance=1, note=f"TTFT {_time(made.ttft_ms)}")
    return chats, answers


def play_second_process(engine: Engine, chats: Sequence[Chat], address: str) -> list[Turn]:
    """Changes state. Another process, started now, goes on with two of the chats."""
    prompts = [chats[0].ask(LATER_QUESTIONS[0]), chats[2].ask(LATER_QUESTIONS[0])]
    with console.status("a second engine process loads the model and goes on with two chats ..."):
        made = subprocess.run(
            [sys.executable, "-m", "benchmarks.demo", "--engine", address],
            input=json.dumps(prompts),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=ENGINE_S_MAX,
            start_new_session=True,  # Ctrl-C is this process's to handle: it ends the other one
        )
        warm = [Answer(**each) for each in json.loads(made.stdout.splitlines()[-1])]
        names = (CONVERSATIONS[0].name, CONVERSATIONS[2].name)
        return [
            Turn(name, 5, engine.cold(prompt), answer)
            for name, prompt, answer in zip(names, prompts, warm, strict=True)
        ]


def play_outage(engine: Engine, chat: Chat, daemon: Daemon, client: kvstore.Client) -> list[Turn]:
    """Changes state. The daemon dies in the middle of the second answer and is back before the fourth."""

    def kill(input_ids: Any, scores: Any, **_: Any) -> Any:
        if input_ids.shape[1] == num_prompt_tokens + KILLED_AT_TOKEN:
            daemon.kill()
        return torch.zeros(1, dtype=torch.bool)

    def restart() -> None:
        daemon.start()
        give_up_at = time.monotonic() + BACK_S_MAX
        while not client.status()["available"]:
            if time.monotonic() > give_up_at:
                raise DaemonFailed("the client did not find the daemon again")
            time.sleep(0.05)

    script: list[tuple[str, Callable[[], None] | None, dict[str, Any]]] = [
        ("service up", None, {}),
        ("killed mid-answer", None, {"stopping_criteria": [kill]}),
        ("service gone", None, {}),
        ("back, first turn", restart, {}),
        ("back, next turn", None, {}),
    ]
    turns = []
    with _progress() as progress:
        task = progress.add_task("kill -9, and back", total=len(script), note="")
        for number, (label, before, options) in enumerate(script):
            prompt = chat.ask(LATER_QUESTIONS[number])
            num_prompt_tokens = len(prompt)
            if before is not None:
                before()
            turns.append(Turn(label, number + 5, engine.cold(prompt), engine.warm(prompt, **options)))
            chat.answered(turns[-1].warm.token_ids)
            progress.update(task, advance=1, note=f"{label}: TTFT {_time(turns[-1].warm.ttft_ms)}")
    return turns


def be_second_process(address: str) -> None:
    """Changes state. What the second engine process does: prompts from stdin, answers to stdout."""
    prompts = json.load(sys.stdin)
    with kvstore.connect(address) as client:
        engine = Engine(client)
        engine.cold(prompts[0][:8])  # so that the first answer does not pay for reading the weights from disk
        answers = [engine.warm(prompt) for prompt in prompts]
    print(json.dumps([{name: getattr(each, name) for name in Answer.__slots__} for each in answers]))


# What is shown


def turn_table(title: str, turns: Sequence[Turn]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("conversation", no_wrap=True)
    for name in ("turn", "prompt\ntokens", "cached\ntokens", "TTFT\nwithout", "TTFT\nwith", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("identical")
    for turn in turns:
        cold, warm = turn.cold, turn.warm
        table.add_row(
            turn.label,
            str(turn.number),
            f"{warm.num_prompt_tokens:,}",
            f"{warm.num_cached_tokens:,}",
            _time(cold.ttft_ms),
            _time(warm.ttft_ms),
            f"{cold.ttft_ms / warm.ttft_ms:.1f} x",
            "[green]yes[/]" if turn.is_same else "[red]no[/]",
        )
    return table


def transcript(engine: Engine, turns: Sequence[Turn]) -> Panel:
    """One conversation as the customer saw it."""
    name = CONVERSATIONS[0].name
    said = Text()
    for turn in (each for each in turns if each.label == name):
        said.append(f"{CONVERSATIONS[0].questions[turn.number - 1]}\n", style="bold")
        said.append(f"{engine.words(turn.warm)} ...\n")
    said.rstrip()
    return Panel(
        said,
        title=f"what was said: {name}",
        subtitle="the words of a model of 135 million parameters",
        title_align="left",
        subtitle_align="left",
        expand=False,
    )


def summary(turns: Sequence[Turn], second: Sequence[Turn], outage: Sequence[Turn], memory: dict[str, Any]) -> Panel:
    every = [*turns, *second, *outage]
    prompt_tokens = sum(turn.warm.num_prompt_tokens for turn in turns)
    cached_tokens = sum(turn.warm.num_cached_tokens for turn in turns)
    hits = [turn for turn in turns if turn.warm.num_cached_tokens]
    without = report.spread(turn.cold.ttft_ms for turn in hits).median
    with_it = report.spread(turn.warm.ttft_ms for turn in hits).median
    speedup = report.spread(turn.cold.ttft_ms / turn.warm.ttft_ms for turn in hits)
    grid = Table.grid(padding=(0, 2))
    for name, fact in (
        ("time to first token", f"{_time(without)} without, [bold]{_time(with_it)}[/] with the service (medians)"),
        (
            "speed-up",
            f"[bold]{speedup.median:.1f} x[/], from {speedup.low:.1f} to {speedup.high:.1f} over {len(hits)} hits",
        ),
        (
            "prefill saved",
            f"{cached_tokens:,} of {prompt_tokens:,} prompt tokens ({cached_tokens / prompt_tokens:.0%})",
        ),
        ("same words", f"{sum(turn.is_same for turn in every)} of {len(every)} answers, token for token"),
        ("other process", f"found {second[0].warm.num_cached_tokens:,} tokens it never computed"),
        ("daemon killed", f"no answer lost; {outage[-1].warm.num_cached_tokens:,} tokens hit again once it was back"),
        ("memory", f"{memory['cached_nbytes'] / 2**20:.0f} MiB cached before the kill, of {CAPACITY}"),
        ("chart", str(CHART.resolve())),
    ):
        grid.add_row(f"[dim]{name}[/]", fact)
    return Panel(grid, title="summary", title_align="left", expand=False)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}[/]"),
        console=console,
    )


def _time(ms: float) -> str:
    return f"{ms / 1000:.2f} s"


def demo() -> int:
    """Changes state. The exit code: 1 when some answer differs or the service gave nothing back."""
    facts = report.machine()
    console.print(f"[bold]kvstore demo[/]  {models.NAME} on {facts['cores']} cores ({facts['cpu']}), {torch_version()}")
    models.prepare()
    with Daemon(CAPACITY) as daemon, kvstore.connect(daemon.address) as client:
        console.print(f"[dim]kvstore serve, pid {daemon.pid}, {daemon.address}, {CAPACITY} of shared memory[/]")
        with console.status("loading the model ..."):
            engine = Engine(client)
            engine.cold(range(8))  # reads the weights from disk
        _, cold = play_script(engine, "without the service", engine.cold)
        chats, warm = play_script(engine, "with the service", engine.warm)
        turns = [
            Turn(CONVERSATIONS[conversation].name, turn + 1, *answers)
            for (conversation, turn), *answers in zip(interleaved(CONVERSATIONS), cold, warm, strict=True)
        ]
        console.print(turn_table("1 and 2: the same chats without and with the service", turns))
        console.print(transcript(engine, turns))
        second = play_second_process(engine, chats, daemon.address)
        console.print(turn_table("3: a second engine process", second))
        memory = client.status()["daemon"]["memory"]
        outage = play_outage(engine, chats[1], daemon, client)
        console.print(turn_table(f"4: kill -9 of the daemon, {CONVERSATIONS[1].name}", outage))
    ttft_chart(CHART, [turn.pair for turn in turns], [turn.pair for turn in outage], per_turn=len(CONVERSATIONS))
    console.print(summary(turns, second, outage, memory))
    served = (turns[-1], *second, outage[-1])
    is_good = all(turn.is_same for turn in (*turns, *second, *outage)) and all(t.warm.num_cached_tokens for t in served)
    return 0 if is_good else 1


def main() -> int:
    if sys.argv[1:2] == ["--engine"]:
        be_second_process(sys.argv[2])
        return 0
    with terminated_like_interrupted():
        return demo()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (models.ModelMissing, DaemonFailed, kvstore.KVStoreError, subprocess.SubprocessError) as failure:
        sys.exit(f"demo: {failure}")
    except KeyboardInterrupt:
        sys.exit("demo: interrupted; everything it started is gone")
