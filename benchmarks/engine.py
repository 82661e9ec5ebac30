"""One question to the real model in the three ways compared: from nothing, from its own cache, from the store."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
import transformers

from connectors.transformers import CachedModel, FirstToken, now_ms


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, and how long the first token took. `token_ids`: prompt and answer."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_ms: float
    restore_ms: float = 0.0
    leads: tuple[float, ...] = ()  # per generated token: by how much its score leads the second best

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


def answer_plain(model: Any, prompt: Sequence[int], max_new_tokens: int, past: Any = None, **options: Any) -> Answer:
    """Query, or changes `past` where one is given: Transformers alone, cold or on its own cache object."""
    input_ids = torch.tensor([prompt])
    num_cached = past.get_seq_length() if past is not None else 0
    began = now_ms()
    first_token = FirstToken()
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        cache=past,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        stopping_criteria=transformers.StoppingCriteriaList([first_token]),
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    best = [torch.topk(scores[0], 2).values.tolist() for scores in output.scores]
    return Answer(
        token_ids=output.sequences[0].tolist(),
        num_prompt_tokens=len(prompt),
        num_cached_tokens=num_cached,
        ttft_ms=first_token.came_at_ms - began,
        leads=tuple(first - second for first, second in best),
    )


def answer_cached(cached: CachedModel, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> Answer:
    """Changes state of the store."""
    made = cached.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=max_new_tokens, **options)
    return Answer(
        token_ids=made.sequences[0].tolist(),
        num_prompt_tokens=made.num_prompt_tokens,
        num_cached_tokens=made.num_cached_tokens,
        ttft_ms=made.ttft_ms,
        restore_ms=made.restore_ms,
    )


class KeptCaches:
    """The oracle: Transformers' own cache objects, one per conversation, kept in the process without a bound."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: dict[int, tuple[list[int], Any]] = {}

    def cropped(self, prompt: Sequence[int]) -> Any:
        """Query. A cache object with the longest prefix of `prompt` that any conversation left; nothing is copied."""
        past = transformers.DynamicCache(config=self._model.config)
        token_ids, kept = max(
            self._kept.values(), key=lambda each: common_prefix(each[0], prompt), default=(list[int](), past)
        )
        num_tokens = min(common_prefix(token_ids, prompt), len(prompt) - 1)
        if num_tokens:
            for layer, source in zip(past.layers, kept.layers, strict=True):
                layer.update(source.keys[..., :0, :], source.values[..., :0, :])
                layer.keys, layer.values = source.keys[..., :num_tokens, :], source.values[..., :num_tokens, :]
        return past

    def keep(self, conversation: int, token_ids: Sequence[int], past: Any) -> None:
        """Changes state. The last token has no KV yet."""
        self._kept[conversation] = (list(token_ids[: past.get_seq_length()]), past)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Query. Number of leading tokens that agree."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def same_words(warm: Answer, cold: Answer, *, tie: float = 1e-3) -> bool:
    """Query. Token for token, except after a step where the cold run's two best tokens all but tie."""
    agree = common_prefix(warm.generated, cold.generated)
    if agree == len(cold.generated) == len(warm.generated):
        return True
    return agree < len(cold.leads) and cold.leads[agree] < tie


def torch_version() -> str:
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads"
