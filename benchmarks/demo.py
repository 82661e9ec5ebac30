"""The demo: a real model answers customers' chats without and with the service, whose daemon then dies and comes back.

    make demo       (or: python -m benchmarks.demo)

1. the support desks of three shops, six conversations of three turns. Every question is answered twice: from nothing,
   then with `kvstore serve` beside the model, whose RAM tier is smaller than what the chats take; the rest is on its
   SSD tier. Same words, a fraction of the time to first token (TTFT)
2. a second engine process goes on with two of the chats and hits what the first one stored
3. the daemon is killed in the middle of an answer: its successor takes the RAM tier over and hits at once; then it is
   stopped and its RAM tier is gone: its successor hits from the SSD

Everything is real: model, tensors, shared memory, files, processes. Nothing is left running or lying about.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import kvstore
from benchmarks import models, report
from benchmarks.charts import Pair, Sources, ttft_chart
from benchmarks.chats import CONVERSATIONS, LATER_QUESTIONS, SISTER_SHOPS, Chat, handbook, interleaved
from benchmarks.daemon import STOP_S_MAX, Daemon, DaemonFailed, terminated_like_interrupted
from benchmarks.engine import Answer, answer_cached, answer_plain, torch_version
from connectors.transformers import CachedModel

TURNS = 3
SCRIPT = tuple(replace(each, questions=each.questions[:TURNS]) for each in CONVERSATIONS)
CHATS_PER_SHOP = len(SCRIPT) // len(SISTER_SHOPS)
GOES_ON = 1  # the conversation that sees the restarts
IN_SECOND_PROCESS = (4, 0)  # of the shop that was served last, and of one whose prompt has left memory

ANSWER_TOKENS = 20
KILLED_AT_TOKEN = 3
GENERATION = {"repetition_penalty": 1.1}  # greedy all the same: without it so small a model repeats itself
MEMORY, SSD = "160MiB", "1GiB"  # a shop's chats take 82 MiB: of three shops, not even two fit
# One engine works at a time, so it may hold all of the memory; what is in it is given back at an orderly end.
DAEMON_OPTIONS = ("--memory.session_share", "1", "--memory.keep", "false", "--disk.capacity", SSD)
RESULTS = Path("results")
CHART = RESULTS / "ttft_by_turn.png"
BACK_S_MAX = 30.0
ENGINE_S_MAX = 300.0

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer of the service's, and where its prompt's KV came from."""

    answer: Answer
    sources: Sources


@dataclass(frozen=True, slots=True)
class Turn:
    """One question, answered twice from the same chat: without the service and with it."""

    label: str
    number: int
    cold: Answer
    warm: Answer
    sources: Sources

    @property
    def is_same(self) -> bool:
        return self.cold.token_ids == self.warm.token_ids

    @property
    def is_hit(self) -> bool:
        """Query. Most of the prompt was not computed. Any two prompts share a few tokens, which alone are none."""
        return self.sources.main != "computed"

    @property
    def pair(self) -> Pair:
        return Pair(self.label, self.cold.ttft_ms, self.warm.ttft_ms, self.sources)


class Restart(NamedTuple):
    """A daemon that came up. Times since its process was started: it listens, the client hits again."""

    up_s: float
    first_hit_s: float
    blocks_taken_over: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """All that was seen."""

    turns: list[Turn]
    second: list[Turn]
    restarts: list[Turn]
    after_kill: Restart
    after_stop: Restart
    ssd_nbytes: int
    ssd_blocks: int

    @property
    def every(self) -> list[Turn]:
        return [*self.turns, *self.second, *self.restarts]

    def faults(self) -> list[str]:
        """Query. What was not as it should be."""
        killed, after_kill, after_stop, _ = self.restarts
        checks = {
            "an answer differs": all(turn.is_same for turn in self.every),
            "the second process missed": all(turn.is_hit for turn in self.second),
            "nothing came from the SSD": any(turn.sources.main == "ssd" for turn in self.turns),
            "nothing came from RAM": any(turn.sources.main == "ram" for turn in self.turns),
            "the daemon was killed before it had served": killed.is_hit,
            "RAM did not outlive the kill": after_kill.sources.main == "ram",
            "the SSD did not outlive the stop": after_stop.sources.main == "ssd" and not after_stop.sources.ram,
        }
        return [fault for fault, is_right in checks.items() if not is_right]


class Engine:
    """The model, its tokenizer, and the two ways to answer."""

    def __init__(self, client: kvstore.Client) -> None:
        self.client = client
        self.model, self.tokenizer = models.load()
        self._cached = CachedModel(self.model, client, name=models.NAME)
        self._cache = client.attach(self._cached.spec)
        self.cold(range(8))  # so that the first answer does not pay for reading the weights from disk

    def cold(self, prompt: Sequence[int]) -> Answer:
        return answer_plain(self.model, prompt, ANSWER_TOKENS, **GENERATION)

    def warm(self, prompt: Sequence[int], meanwhile: Callable[[], None] = lambda: None) -> Answered:
        """Changes state of the store. `meanwhile` happens in the midst of the answer."""
        before, after = self._hit_tokens(), list[tuple[int, int]]()

        def look_aside(input_ids: Any, scores: Any, **_: Any) -> Any:
            if input_ids.shape[1] == len(prompt) + KILLED_AT_TOKEN:
                after.append(self._hit_tokens())
                meanwhile()
            return torch.zeros(1, dtype=torch.bool)

        answer = answer_cached(self._cached, prompt, ANSWER_TOKENS, stopping_criteria=[look_aside], **GENERATION)
        return Answered(answer, _sources(answer, before, after[0] if after else self._hit_tokens()))

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """Query. Tokens of the prompt in whatever tier; 0 without a daemon."""
        return self._cache.match(prompt[:-1])

    def words(self, answer: Answer) -> str:
        return str(self.tokenizer.decode(answer.generated, skip_special_tokens=True)).strip()

    def _hit_tokens(self) -> tuple[int, int]:
        """Tokens of all hits so far, and those of them that had to be brought up from the SSD."""
        stats = status(self.client)["stats"]
        return stats["tokens_hit"], stats["tokens_loaded"]


def _sources(answer: Answer, before: tuple[int, int], after: tuple[int, int]) -> Sources:
    """What was in memory comes first in a prompt, what had to be loaded after it."""
    hit, loaded = after[0] - before[0], after[1] - before[1]
    ram = min(hit - loaded, answer.num_cached_tokens)
    return Sources(ram, answer.num_cached_tokens - ram, answer.num_prompt_tokens - answer.num_cached_tokens)


def status(client: kvstore.Client) -> dict[str, Any]:
    """Query. The daemon's facts. DaemonFailed when it does not answer for long."""
    give_up_at = time.monotonic() + BACK_S_MAX
    while True:
        facts: dict[str, Any] | None = client.status()["daemon"]
        if facts is not None:
            return facts
        if time.monotonic() > give_up_at:
            raise DaemonFailed("the daemon does not answer")
        time.sleep(0.05)


# The three parts


def play_script(engine: Engine) -> tuple[list[Chat], list[Turn]]:
    """Changes state. All conversations, interleaved; the chats go on from here.

    A question's two answers follow each other, so that whatever else the machine does disturbs both.
    """
    cold_chats, chats = ([Chat(engine.tokenizer, handbook(_shop(at))) for at in range(len(SCRIPT))] for _ in range(2))
    order, turns = list(interleaved(SCRIPT)), []
    with _progress() as progress:
        task = progress.add_task("without and with", total=len(order), note="")
        for at, number in order:
            question = SCRIPT[at].questions[number]
            cold, warm = engine.cold(cold_chats[at].ask(question)), engine.warm(chats[at].ask(question))
            cold_chats[at].answered(cold.token_ids)
            chats[at].answered(warm.answer.token_ids)
            turns.append(_turn(SCRIPT[at].name, number + 1, cold, warm))
            progress.update(task, advance=1, note=f"TTFT {_time(cold.ttft_ms)}, {_time(warm.answer.ttft_ms)}")
    return chats, turns


def play_second_process(engine: Engine, chats: Sequence[Chat], address: str) -> list[Turn]:
    """Changes state. Another process, started now, goes on with two of the chats."""
    prompts = [chats[number].ask(LATER_QUESTIONS[0]) for number in IN_SECOND_PROCESS]
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
        turns = []
        for number, prompt, warm in zip(
            IN_SECOND_PROCESS, prompts, json.loads(made.stdout.splitlines()[-1]), strict=True
        ):
            warm = Answered(Answer(**warm["answer"]), Sources(*warm["sources"]))
            turns.append(_turn(SCRIPT[number].name, TURNS + 1, engine.cold(prompt), warm))
        return turns


def be_second_process(address: str) -> None:
    """Changes state. What the second engine process does: prompts from stdin, answers to stdout."""
    prompts = json.load(sys.stdin)
    with kvstore.connect(address) as client:
        engine = Engine(client)
        answers = [engine.warm(prompt) for prompt in prompts]
    print(json.dumps([asdict(each) for each in answers]))


def play_restarts(engine: Engine, chat: Chat, daemon: Daemon) -> tuple[list[Turn], Restart, Restart]:
    """Changes state. The daemon dies in the middle of the first answer; before the third one it is stopped in order."""
    turns: list[Turn] = []
    with _progress() as progress:
        task = progress.add_task("kill, stop, and back", total=4, note="")

        def play(label: str, meanwhile: Callable[[], None] = lambda: None) -> None:
            prompt = chat.ask(LATER_QUESTIONS[len(turns)])
            cold, warm = engine.cold(prompt), engine.warm(prompt, meanwhile)
            turns.append(_turn(label, TURNS + 1 + len(turns), cold, warm))
            chat.answered(warm.answer.token_ids)
            progress.update(task, advance=1, note=f"{label}: TTFT {_time(warm.answer.ttft_ms)}")

        play("killed mid-answer", daemon.kill)
        after_kill = come_back(engine, chat.ask(LATER_QUESTIONS[1]), daemon)
        play("after the kill")
        stop(daemon)
        after_stop = come_back(engine, chat.ask(LATER_QUESTIONS[2]), daemon)
        play("RAM was empty")
        play("next question")
    return turns, after_kill, after_stop


def come_back(engine: Engine, prompt: Sequence[int], daemon: Daemon) -> Restart:
    """Changes state. Start a daemon where the last one was, and wait for the first hit."""
    began_s = time.monotonic()
    daemon.start()
    up_s = time.monotonic() - began_s
    while (num_tokens := engine.cached_tokens(prompt)) < len(prompt) // 2:
        if time.monotonic() > began_s + BACK_S_MAX:
            raise DaemonFailed("the daemon came back, but what it had is not found again")
        time.sleep(0.005)
    first_hit_s = time.monotonic() - began_s
    return Restart(up_s, first_hit_s, status(engine.client)["memory"]["blocks_taken_over"], num_tokens)


def stop(daemon: Daemon) -> None:
    """Changes state. An orderly end. This daemon does not keep its RAM tier then: see its options."""
    os.kill(daemon.pid, signal.SIGTERM)
    give_up_at = time.monotonic() + STOP_S_MAX
    while os.waitid(os.P_PID, daemon.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > give_up_at:
            raise DaemonFailed("the daemon does not end")
        time.sleep(0.02)
    daemon.kill()  # it is dead; this notes it


# What is shown


def turn_table(title: str, turns: Sequence[Turn]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("conversation", no_wrap=True)
    for name in (
        "turn",
        "prompt\ntokens",
        "from\nRAM",
        "from\nSSD",
        "com-\nputed",
        "TTFT\nwithout",
        "TTFT\nwith",
        "ratio",
    ):
        table.add_column(name, justify="right")
    table.add_column("identical")
    for turn in turns:
        cold, warm = turn.cold, turn.warm
        table.add_row(
            turn.label,
            str(turn.number),
            f"{warm.num_prompt_tokens:,}",
            *(f"{count:,}" for count in turn.sources),
            _time(cold.ttft_ms),
            _time(warm.ttft_ms),
            f"{cold.ttft_ms / warm.ttft_ms:.1f} x",
            "[green]yes[/]" if turn.is_same else "[red]no[/]",
        )
    return table


def transcript(engine: Engine, turns: Sequence[Turn]) -> Panel:
    """One conversation as the customer saw it."""
    name = SCRIPT[0].name
    said = Text()
    for turn in (each for each in turns if each.label == name):
        said.append(f"{SCRIPT[0].questions[turn.number - 1]}\n", style="bold")
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


def restart_lines(run: Run) -> str:
    """Query. What the new daemons found, and when they were of use."""
    killed, stopped = run.after_kill, run.after_stop
    return (
        f" [dim]after the kill[/]  {killed.blocks_taken_over} blocks taken over in RAM; {_back(killed)}\n"
        f" [dim]after the stop[/]  {stopped.blocks_taken_over} blocks in RAM, {run.ssd_blocks} on the SSD; "
        f"{_back(stopped)}\n"
    )


def _back(restart: Restart) -> str:
    return f"daemon up after {restart.up_s:.2f} s, first hit after {restart.first_hit_s:.2f} s"


def summary(run: Run) -> Panel:
    grid = Table.grid(padding=(0, 2))
    for name, fact in (
        *_time_facts(run.turns),
        ("prefill saved", _prefill_fact(run.turns)),
        ("same words", f"{sum(turn.is_same for turn in run.every)} of {len(run.every)} answers, token for token"),
        ("other process", f"found {_tokens_found(run.second)} that it never computed"),
        ("daemon killed", "no answer lost; " + _restart_fact(run.after_kill, "RAM")),
        ("RAM emptied", _restart_fact(run.after_stop, "SSD")),
        ("space", f"RAM {MEMORY}; SSD {run.ssd_nbytes / 2**20:.0f} MiB used of {SSD}"),
        ("chart", str(CHART.resolve())),
    ):
        grid.add_row(f"[dim]{name}[/]", fact)
    return Panel(grid, title="summary", title_align="left", expand=False)


def _time_facts(turns: Sequence[Turn]) -> list[tuple[str, str]]:
    """Medians: without the service, and with it by the tier that most of the prompt came from."""
    hits = [turn for turn in turns if turn.is_hit]
    if not hits:
        return [("time to first token", "[red]no hit[/]")]
    without = report.spread(turn.cold.ttft_ms for turn in hits).median
    speedup = report.spread(turn.cold.ttft_ms / turn.warm.ttft_ms for turn in hits)
    facts = [("time to first token", f"{_time(without)} without the service (medians)")]
    for tier, shown in (("ram", "RAM"), ("ssd", "SSD")):
        times = [turn.warm.ttft_ms for turn in hits if turn.sources.main == tier]
        if times:
            facts.append(("", f"[bold]{_time(report.spread(times).median)}[/] with it, prompt mostly from {shown}"))
    spread = f"from {speedup.low:.1f} to {speedup.high:.1f} over {len(hits)} hits"
    return [*facts, ("speed-up", f"[bold]{speedup.median:.1f} x[/], {spread}")]


def _prefill_fact(turns: Sequence[Turn]) -> str:
    prompt_tokens = sum(turn.warm.num_prompt_tokens for turn in turns)
    cached_tokens = sum(turn.warm.num_cached_tokens for turn in turns)
    share = f"[bold]{cached_tokens / prompt_tokens:.0%}[/]"
    return f"{share} of {prompt_tokens:,} prompt tokens: {_tokens_found(turns)}"


def _tokens_found(turns: Sequence[Turn]) -> str:
    ram, ssd = (sum(turn.sources[tier] for turn in turns) for tier in (0, 1))
    return f"{ram:,} tokens in RAM and {ssd:,} on the SSD"


def _restart_fact(restart: Restart, tier: str) -> str:
    return f"first hit {restart.first_hit_s:.2f} s after the restart: {restart.num_tokens:,} tokens from {tier}"


def _shop(conversation: int) -> str:
    return SISTER_SHOPS[conversation // CHATS_PER_SHOP]


def _turn(label: str, number: int, cold: Answer, warm: Answered) -> Turn:
    return Turn(label, number, cold, warm.answer, warm.sources)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}[/]"),
        console=console,
    )


@contextmanager
def _client_log() -> Iterator[None]:
    """What the client library says of the daemon, above the progress bar."""

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(f"[dim]log: {escape(record.getMessage())}[/]")

    log, handler = logging.getLogger("kvstore"), Shown(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _time(ms: float) -> str:
    return f"{ms / 1000:.2f} s"


def _draw(run: Run) -> None:
    """Changes state: writes the chart."""
    groups = [f"{shop}\nturn {turn + 1}" for turn in range(TURNS) for shop in SISTER_SHOPS]
    turns, restarts = ([turn.pair for turn in part] for part in (run.turns, run.restarts))
    ttft_chart(CHART, turns, restarts, groups=groups, per_group=CHATS_PER_SHOP)


def play(daemon: Daemon, client: kvstore.Client) -> Run:
    """Changes state. All three parts, each shown when it is over."""
    with console.status("loading the model ..."):
        engine = Engine(client)
    chats, turns = play_script(engine)
    console.print(turn_table("1: the same chats without and with the service", turns))
    console.print(transcript(engine, turns))
    second = play_second_process(engine, chats, daemon.address)
    console.print(turn_table("2: a second engine process", second))
    with _client_log():
        restarts, after_kill, after_stop = play_restarts(engine, chats[GOES_ON], daemon)
    console.print(turn_table(f"3: kill -9 of the daemon, then a stop: {SCRIPT[GOES_ON].name}", restarts))
    ssd = status(client)["disk"]
    run = Run(turns, second, restarts, after_kill, after_stop, ssd["cached_nbytes"], ssd["blocks"])
    console.print(restart_lines(run))
    return run


def demo() -> int:
    """Changes state. The exit code: 1 when some answer differs or the service gave nothing back."""
    facts = report.machine()
    console.print(f"[bold]kvstore demo[/]  {models.NAME} on {facts['cores']} cores ({facts['cpu']})")
    console.print(f"[dim]{torch_version()}[/]")
    models.prepare()
    RESULTS.mkdir(exist_ok=True)
    with ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="demo-ssd-", dir=RESULTS))
        daemon = held.enter_context(Daemon(MEMORY, *DAEMON_OPTIONS, "--disk.path", folder))
        client = held.enter_context(kvstore.connect(daemon.address))
        console.print(f"[dim]kvstore serve, pid {daemon.pid}: {MEMORY} of shared memory, {SSD} on SSD in {folder}[/]")
        run = play(daemon, client)
    _draw(run)
    console.print(summary(run))
    for fault in run.faults():
        console.print(f"[red]demo: {fault}[/]")
    return 1 if run.faults() else 0


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
