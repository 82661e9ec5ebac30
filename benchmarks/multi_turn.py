"""TTFT of multi-turn chats with a real model: cold, with Transformers' own cache kept, and with the store.

Every round is one question of one conversation, answered five times from the same prompt, in rotating order:

    cold      the whole prompt is computed
    oracle    Transformers' own cache object, kept in the process and cropped to the common prefix: the best possible
    warm      CachedModel on a real daemon process: restored from its slab, the rest computed
    ssd       the same with another daemon, all of whose blocks are on its SSD only
    slow      the same again; after the first round its drive is slowed to --slow-mbps (benchmarks.throttled)

After the last round that drive is as fast as before again: `recovered_after` says how many questions it takes until one
is answered as soon as from the other SSD, or nearly so.

`memcpy_floor_ms` is what copying the restored bytes costs in any case: a plain copy into freshly allocated tensors of
the same shapes. The first question only fills the caches; all others have a cached prefix of at least 1,500 tokens.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import kvstore
from benchmarks import models, report, throttled
from benchmarks.chats import CONVERSATIONS, LATER_QUESTIONS, Chat, interleaved
from benchmarks.daemon import Daemon, DaemonFailed, terminated_like_interrupted
from benchmarks.disk_rate import disk_options, folder_in
from benchmarks.engine import (
    Answer,
    KeptCaches,
    answer_cached,
    answer_plain,
    common_prefix,
    same_words,
    torch_version,
)
from connectors.transformers import CachedModel, now_ms
from kvstore.service.client import DEADLINE_MS

NUM_CONVERSATIONS = 4
ANSWER_TOKENS = 16
PREFIX_TOKENS_MIN = 1500
SUFFIX_TOKENS_MAX = 64
SSD_VS_COLD_MAX = 0.4
SLOW_VS_COLD_MAX = 1.05
MEMORY = "1GiB"
DISK_NBYTES = 2 << 30
SLOW_MBPS = 50.0
NEAR_SSD = 1.5  # TTFT against that of the SSD that was never slow
SETTLE_S_MAX = 60.0
PATIENT_MS = 10_000.0


@dataclass(frozen=True, slots=True)
class Round:
    """One question, answered five times."""

    num_held: int  # tokens of the prompt that an unlimited cache in the process would hold
    cold: Answer
    oracle: Answer
    warm: Answer
    ssd: Answer
    slow: Answer
    floor_ms: float


class OnSsd:
    """A CachedModel that finds its blocks on the SSD only: before each answer, memory is emptied."""

    def __init__(self, model: Any, client: kvstore.Client, patient: kvstore.Client) -> None:
        """`client`: the engine's. `patient`: another of the same daemon, for what is not measured."""
        self._client = patient
        self._cached = CachedModel(model, client, name=models.NAME)
        self._cache = patient.attach(self._cached.spec)
        self._wait(lambda disk: bool(disk["ready"] and disk["extents_unassigned"]))

    def answer(self, prompt: list[int]) -> Answer:
        """Changes state. Returns once all of it is on the SSD, so that nothing disturbs the next answer."""
        self._empty_memory()
        answer = answer_cached(self._cached, prompt, ANSWER_TOKENS)
        self._wait(lambda disk: bool(disk["idle"] and not disk["loading_nbytes"]))
        return answer

    def stats(self) -> dict[str, Any]:
        """Query. The daemon's counters."""
        stats: dict[str, Any] = self._status()["stats"]
        return stats

    def _empty_memory(self) -> None:
        """Room for as many blocks as there can be is asked for, which evicts all, and given back."""
        spec = self._cached.spec
        num_blocks = self._status()["memory"]["capacity_nbytes"] // spec.slot_nbytes
        self._cache.reserve(np.zeros(num_blocks * spec.block_tokens, np.uint32)).abort()
        assert not self._status()["memory"]["cached_nbytes"]

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] | None = self._client.status()["daemon"]
        if status is None:
            raise DaemonFailed("the daemon with an SSD tier does not answer")
        return status

    def _wait(self, until: Callable[[dict[str, Any]], bool]) -> None:
        give_up_at = time.monotonic() + SETTLE_S_MAX
        while not until(self._status()["disk"]):
            if time.monotonic() > give_up_at:
                raise DaemonFailed(f"the SSD tier does not come to rest: {self._status()['disk']}")
            time.sleep(0.01)


class Stores(NamedTuple):
    """What answers, apart from Transformers alone."""

    warm: CachedModel
    ssd: OnSsd
    slow: OnSsd
    rate_file: Path  # of the slow one's drive


class Desk:
    """The model with everything it can start from, and all that was said."""

    def __init__(self, model: Any, tokenizer: Any, stores: Stores) -> None:
        self._model = model
        self._stores = stores
        self._kept = KeptCaches(model)
        self._chats = [Chat(tokenizer) for _ in CONVERSATIONS]
        self._said: list[list[int]] = []  # the tokens whose KV the store was given, call by call

    def play(self, conversation: int, turn: int, number: int) -> Round:
        """Changes state. One question; `number` rotates which answer goes first."""
        prompt = self._chats[conversation].ask(CONVERSATIONS[conversation].questions[turn])
        num_held = max((common_prefix(each, prompt[:-1]) for each in self._said), default=0)
        past = self._kept.cropped(prompt)
        floor_ms = _memcpy_floor_ms(past)
        ways: list[tuple[str, Callable[[], Answer]]] = [
            ("cold", lambda: answer_plain(self._model, prompt, ANSWER_TOKENS)),
            ("oracle", lambda: answer_plain(self._model, prompt, ANSWER_TOKENS, past)),
            ("warm", lambda: answer_cached(self._stores.warm, prompt, ANSWER_TOKENS)),
            ("ssd", lambda: self._stores.ssd.answer(prompt)),
            ("slow", lambda: self._stores.slow.answer(prompt)),
        ]
        first = number % len(ways)
        answers = {name: answer() for name, answer in ways[first:] + ways[:first]}
        spoken = answers["oracle"].token_ids
        self._kept.keep(conversation, spoken, past)
        self._chats[conversation].answered(spoken)
        self._said.append(answers["warm"].token_ids[:-1])
        return Round(num_held=num_held, floor_ms=floor_ms, **answers)

    def slow_down(self, mbps: float) -> None:
        """Changes state. From now on, after one answer from a drive that was fast, so that this is what is expected."""
        self._stores.slow.answer(self._chats[0].ask(LATER_QUESTIONS[0]))
        throttled.set_rate(self._stores.rate_file, 1e6 * mbps)

    def recover(self) -> list[float]:
        """Changes state. TTFT in ms of questions that follow when the slow drive is fast again."""
        throttled.set_rate(self._stores.rate_file, None)
        prompts = [self._chats[0].ask(question) for question in LATER_QUESTIONS]
        return [self._stores.slow.answer(prompt).ttft_ms for prompt in prompts]


def main() -> int:
    options = report.parser(__doc__)
    options.add_argument("--slow-mbps", type=float, default=SLOW_MBPS, help="10^6 bytes a second (%(default)s)")
    options.add_argument("--folder", type=Path, default=Path(".bench"), help="on the SSD to use (%(default)s)")
    given = options.parse_args()
    model, tokenizer = models.load()
    with terminated_like_interrupted(), _stores(model, given.folder) as stores:
        desk = Desk(model, tokenizer, stores)
        rounds = []
        for number, (conversation, turn) in enumerate(interleaved(CONVERSATIONS[:NUM_CONVERSATIONS])):
            rounds.append(desk.play(conversation, turn, number))
            print(f"round {number}: {_line(rounds[-1])}", file=sys.stderr, flush=True)
            if number == 0:
                desk.slow_down(given.slow_mbps)
        results = _results(rounds[1:]) | _slow_results(rounds[1:], desk.recover(), stores.slow.stats(), given.slow_mbps)
        results["ssd_tokens_ratio"] = _tokens_from_ssd(stores.ssd.stats(), rounds)
    return report.finish("multi_turn", results, _bars(results), as_json=given.json)


@contextmanager
def _stores(model: Any, base: Path) -> Iterator[Stores]:
    with ExitStack() as held:
        folder = held.enter_context(folder_in(base))
        rate_file = folder / "rate"
        slow_command = throttled.command(rate_file)
        warm = held.enter_context(Daemon(MEMORY))
        ssd = held.enter_context(Daemon(MEMORY, *disk_options(folder / "fast", DISK_NBYTES)))
        slow = held.enter_context(Daemon(MEMORY, *disk_options(folder / "slow", DISK_NBYTES), command=slow_command))

        def client(daemon: Daemon, deadline_ms: float = DEADLINE_MS) -> kvstore.Client:
            return held.enter_context(kvstore.connect(daemon.address, deadline_ms=deadline_ms))

        cached = CachedModel(model, client(warm), name=models.NAME)
        fast, slowed = (OnSsd(model, client(daemon), client(daemon, PATIENT_MS)) for daemon in (ssd, slow))
        yield Stores(cached, fast, slowed, rate_file)


def _results(rounds: list[Round]) -> dict[str, Any]:
    figures = {
        "ttft_cold_ms": [each.cold.ttft_ms for each in rounds],
        "ttft_oracle_ms": [each.oracle.ttft_ms for each in rounds],
        "ttft_warm_ms": [each.warm.ttft_ms for each in rounds],
        "ttft_ssd_ms": [each.ssd.ttft_ms for each in rounds],
        "ttft_slow_ms": [each.slow.ttft_ms for each in rounds],
        "speedup": [each.cold.ttft_ms / each.warm.ttft_ms for each in rounds],
        "ssd_vs_cold": [each.ssd.ttft_ms / each.cold.ttft_ms for each in rounds],
        "slow_vs_cold": [each.slow.ttft_ms / each.cold.ttft_ms for each in rounds],
        "restore_ms": [each.warm.restore_ms for each in rounds],
        "restore_ssd_ms": [each.ssd.restore_ms for each in rounds],
        "memcpy_floor_ms": [each.floor_ms for each in rounds],
    }
    spreads = {name: report.spread(values) for name, values in figures.items()}
    held = sum(each.num_held for each in rounds)
    return {
        "model": models.NAME,
        "prefix_tokens": min(each.num_held for each in rounds),
        "suffix_tokens": max(each.cold.num_prompt_tokens - each.num_held for each in rounds),
        **{name: round(each.median, 3) for name, each in spreads.items()},
        "identical": all(each.oracle.token_ids == warm.token_ids for each in rounds for warm in (each.warm, each.ssd)),
        "cold_mismatches": sum(
            not same_words(warm, each.cold) for each in rounds for warm in (each.warm, each.ssd, each.slow)
        ),
        "hit_tokens_ratio": round(sum(each.warm.num_cached_tokens for each in rounds) / held, 5),
        "rounds": len(rounds),
        "answer_tokens": ANSWER_TOKENS,
        "libraries": torch_version(),
        "spread": {name: [round(each.low, 3), round(each.high, 3)] for name, each in spreads.items()},
    }


def _slow_results(
    rounds: list[Round], recovered_ms: list[float], stats: dict[str, Any], slow_mbps: float
) -> dict[str, Any]:
    near_ms = NEAR_SSD * report.spread(each.ssd.ttft_ms for each in rounds).median
    needed = next((number for number, ttft_ms in enumerate(recovered_ms, 1) if ttft_ms <= near_ms), None)
    return {
        "slow_mbps": slow_mbps,
        "slow_vs_cold_max": round(max(each.slow.ttft_ms / each.cold.ttft_ms for each in rounds), 3),
        "slow_loads": {name: stats[f"loads_{name}"] for name in ("refused", "probed", "cut")},
        "recovers": needed is not None,
        "recovered_after": needed,
        "ttft_recovered_ms": [round(ttft_ms, 3) for ttft_ms in recovered_ms],
    }


def _tokens_from_ssd(stats: dict[str, Any], rounds: list[Round]) -> float:
    """Query. Of the tokens that were restored, those that came from the SSD."""
    return round(float(stats["tokens_loaded"] / sum(each.ssd.num_cached_tokens for each in rounds)), 5)


def _bars(results: dict[str, Any]) -> list[report.Bar]:
    floor_ms = results["memcpy_floor_ms"]
    return [
        report.at_least("prefix_tokens", results["prefix_tokens"], PREFIX_TOKENS_MIN),
        report.at_most("suffix_tokens", results["suffix_tokens"], SUFFIX_TOKENS_MAX),
        report.at_most("ttft_warm_ms", results["ttft_warm_ms"], 1.15 * results["ttft_oracle_ms"] + floor_ms + 10),
        report.at_least("speedup", results["speedup"], 5),
        report.at_most("restore_ms", results["restore_ms"], 1.5 * floor_ms + 5),
        report.holds("identical", results["identical"]),
        report.at_most("cold_mismatches", results["cold_mismatches"], 0),
        report.at_least("hit_tokens_ratio", results["hit_tokens_ratio"], 0.99),
        report.at_most("ssd_vs_cold", results["ssd_vs_cold"], SSD_VS_COLD_MAX),
        report.at_least("ssd_tokens_ratio", results["ssd_tokens_ratio"], 1),
        report.at_most("slow_vs_cold", results["slow_vs_cold"], SLOW_VS_COLD_MAX),
        report.holds("recovers", results["recovers"]),
    ]


def _memcpy_floor_ms(past: Any) -> float:
    """A plain copy of what `past` holds, tensor by tensor, into fresh memory. The sources are packed before."""
    if not past.get_seq_length():
        return 0.0
    sources = [tensor.contiguous() for layer in past.layers for tensor in (layer.keys, layer.values)]
    began = now_ms()
    copies = [torch.empty_like(source).copy_(source) for source in sources]
    took_ms = now_ms() - began
    assert len(copies) == len(sources)
    return took_ms


def _line(played: Round) -> str:
    return (
        f"prompt {played.cold.num_prompt_tokens}, cached {played.warm.num_cached_tokens} of {played.num_held}; "
        f"TTFT ms: cold {played.cold.ttft_ms:.0f}, oracle {played.oracle.ttft_ms:.0f}, warm {played.warm.ttft_ms:.0f}, "
        f"ssd {played.ssd.ttft_ms:.0f}, slow {played.slow.ttft_ms:.0f} (cached {played.slow.num_cached_tokens}) "
        f"(restore {played.warm.restore_ms:.1f}, floor {played.floor_ms:.1f})"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (models.ModelMissing, DaemonFailed, kvstore.KVStoreError) as failure:
        sys.exit(f"multi_turn: {failure}")
    except KeyboardInterrupt:
        sys.exit("multi_turn: interrupted")
