"""TTFT of multi-turn chats with a real model: cold, with Transformers' own cache kept, and with the store.

Every round is one question of one conversation, answered three times from the same prompt, in rotating order:

    cold      the whole prompt is computed
    oracle    Transformers' own cache object, kept in the process and cropped to the common prefix: the best possible
    warm      CachedModel on a real daemon process: restored from its slab, the rest computed

`memcpy_floor_ms` is what copying the restored bytes costs in any case: a plain copy into freshly allocated tensors of
the same shapes. The first question only fills the caches; all others have a cached prefix of at least 1,500 tokens.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import kvstore
from benchmarks import models, report
from benchmarks.chats import CONVERSATIONS, Chat, interleaved
from benchmarks.daemon import Daemon, DaemonFailed, terminated_like_interrupted
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

NUM_CONVERSATIONS = 4
ANSWER_TOKENS = 16
PREFIX_TOKENS_MIN = 1500
SUFFIX_TOKENS_MAX = 64


@dataclass(frozen=True, slots=True)
class Round:
    """One question, answered three times."""

    num_held: int  # tokens of the prompt that an unlimited cache in the process would hold
    cold: Answer
    oracle: Answer
    warm: Answer
    floor_ms: float


class Desk:
    """The model with everything it can start from, and all that was said."""

    def __init__(self, model: Any, tokenizer: Any, cached: CachedModel) -> None:
        self._model = model
        self._cached = cached
        self._kept = KeptCaches(model)
        self._chats = [Chat(tokenizer) for _ in CONVERSATIONS]
        self._said: list[list[int]] = []  # the tokens whose KV the store was given, call by call

    def play(self, conversation: int, turn: int, number: int) -> Round:
        """Changes state. One question; `number` rotates which of the three goes first."""
        prompt = self._chats[conversation].ask(CONVERSATIONS[conversation].questions[turn])
        num_held = max((common_prefix(each, prompt[:-1]) for each in self._said), default=0)
        past = self._kept.cropped(prompt)
        floor_ms = _memcpy_floor_ms(past)
        ways: list[tuple[str, Callable[[], Answer]]] = [
            ("cold", lambda: answer_plain(self._model, prompt, ANSWER_TOKENS)),
            ("oracle", lambda: answer_plain(self._model, prompt, ANSWER_TOKENS, past)),
            ("warm", lambda: answer_cached(self._cached, prompt, ANSWER_TOKENS)),
        ]
        first = number % len(ways)
        answers = {name: answer() for name, answer in ways[first:] + ways[:first]}
        spoken = answers["oracle"].token_ids
        self._kept.keep(conversation, spoken, past)
        self._chats[conversation].answered(spoken)
        self._said.append(answers["warm"].token_ids[:-1])
        return Round(num_held=num_held, floor_ms=floor_ms, **answers)


def main() -> int:
    options = report.parser(__doc__).parse_args()
    model, tokenizer = models.load()
    with (
        terminated_like_interrupted(),
        Daemon("1GiB") as daemon,
        kvstore.connect(daemon.address) as client,
    ):
        desk = Desk(model, tokenizer, CachedModel(model, client, name=models.NAME))
        rounds = []
        for number, (conversation, turn) in enumerate(interleaved(CONVERSATIONS[:NUM_CONVERSATIONS])):
            rounds.append(desk.play(conversation, turn, number))
            print(f"round {number}: {_line(rounds[-1])}", file=sys.stderr, flush=True)
    results = _results(rounds[1:])
    return report.finish("multi_turn", results, _bars(results), as_json=options.json)


def _results(rounds: list[Round]) -> dict[str, Any]:
    figures = {
        "ttft_cold_ms": [each.cold.ttft_ms for each in rounds],
        "ttft_oracle_ms": [each.oracle.ttft_ms for each in rounds],
        "ttft_warm_ms": [each.warm.ttft_ms for each in rounds],
        "speedup": [each.cold.ttft_ms / each.warm.ttft_ms for each in rounds],
        "restore_ms": [each.warm.restore_ms for each in rounds],
        "memcpy_floor_ms": [each.floor_ms for each in rounds],
    }
    spreads = {name: report.spread(values) for name, values in figures.items()}
    held = sum(each.num_held for each in rounds)
    return {
        "model": models.NAME,
        "prefix_tokens": min(each.num_held for each in rounds),
        "suffix_tokens": max(each.cold.num_prompt_tokens - each.num_held for each in rounds),
        **{name: round(each.median, 3) for name, each in spreads.items()},
        "identical": all(each.warm.token_ids == each.oracle.token_ids for each in rounds),
        "cold_mismatches": sum(not same_words(each.warm, each.cold) for each in rounds),
        "hit_tokens_ratio": round(sum(each.warm.num_cached_tokens for each in rounds) / held, 5),
        "rounds": len(rounds),
        "answer_tokens": ANSWER_TOKENS,
        "libraries": torch_version(),
        "spread": {name: [round(each.low, 3), round(each.high, 3)] for name, each in spreads.items()},
    }


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
        f"TTFT ms: cold {played.cold.ttft_ms:.0f}, oracle {played.oracle.ttft_ms:.0f}, warm {played.warm.ttft_ms:.0f} "
        f"(restore {played.warm.restore_ms:.1f}, floor {played.floor_ms:.1f})"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (models.ModelMissing, DaemonFailed, kvstore.KVStoreError) as failure:
        sys.exit(f"multi_turn: {failure}")
    except KeyboardInterrupt:
        sys.exit("multi_turn: interrupted")
