"""Hugging Face Transformers: `generate` that starts from the longest prefix the store holds, and stores what it made.

    model = AutoModelForCausalLM.from_pretrained(...).eval()
    cached = CachedModel(model, kvstore.connect("ipc:///run/kvstore/kvstore.sock"))
    answer = cached.generate(input_ids, max_new_tokens=64)      # answer.sequences: as model.generate returns them

One call:   acquire -> copy blocks into one buffer -> DynamicCache over it -> model.generate: prefills the rest, decodes
            -> reserve -> copy what is new -> commit

Supported: decoder-only models whose every layer keeps all keys and values (plain DynamicCache layers), one sequence,
greedy or sampling. Everything else is a ValueError that names the reason, before anything is computed: a prefix cache
that guesses is silently wrong. Written against Transformers 5.19 to 5.24; names that changed are found by signature.
"""

import inspect
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash

from connectors.common import KVArray, PrefixBuffer, copy_hit, write_blocks
from kvstore import Client, KVSpec

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Facts of a config that say where a model came from, not what it computes.
PROVENANCE = ("_name_or_path", "_model_name_or_path", "transformers_version")

# Arguments of `generate` that neither GenerationConfig holds nor the model sees.
PASSED_ON = {
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "tokenizer",
}


def _is_set(value: Any) -> bool:
    return value not in (None, False)


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


# What GenerationConfig can ask for and a restored prefix cannot serve: name, when, why.
UNSUPPORTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("num_beams", _above_one, "beam search keeps one cache per beam"),
    ("num_beam_groups", _above_one, "beam search keeps one cache per beam"),
    ("num_return_sequences", _above_one, "only one sequence per call"),
    ("use_cache", lambda value: value is False, "there is no cache to restore into"),
    (
        "cache_implementation",
        lambda value: value is not None,
        "the cache is a dynamic one, never static, offloaded, paged or quantised",
    ),
    ("prompt_lookup_num_tokens", _is_set, "assisted decoding rolls the cache back"),
    ("assistant_early_exit", _is_set, "assisted decoding rolls the cache back"),
    ("is_assistant", _is_set, "assisted decoding rolls the cache back"),
    ("use_mtp", _is_set, "assisted decoding rolls the cache back"),
    ("penalty_alpha", _is_set, "contrastive search rolls the cache back"),
    ("dola_layers", _is_set, "DoLa decoding is not supported"),
    ("constraints", _is_set, "constrained beam search keeps one cache per beam"),
    ("force_words_ids", _is_set, "constrained beam search keeps one cache per beam"),
    ("token_healing", _is_set, "token healing changes the prompt"),
)


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer, and what the store had to do with it."""

    output: Any  # what model.generate returned: a tensor, or with return_dict_in_generate its dictionary
    sequences: Any  # [1, tokens]: prompt and answer
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, restored and not computed
    num_stored_tokens: int  # in the blocks this call wrote; a short last block that grew is written again whole
    ttft_ms: float  # from the call to the first token
    restore_ms: float  # of that: look-up, copy and wrapping
    store_ms: float  # after the last token


class CachedModel:
    """A model whose `generate` finds prefixes in the store. One call at a time; a second thread waits.

    `name` and `revision` identify the weights. By default the revision is a digest of all of them (about 0.1 s per
    GB, once), of the config, of the attention implementation and of the library's version: whatever changes KV bytes
    is another spec and never hits. A `revision` given by the caller replaces the digest of the weights only; it is
    then the caller's promise that equal revisions are equal weights.
    """

    def __init__(
        self, model: Any, client: Client, *, name: str = "", revision: str = "", block_tokens: int = 64
    ) -> None:
        """Changes state: attaches to the store. ValueError: a model that is not supported. KVStoreError: no store."""
        _refuse_model(model)
        self._model = model
        self._computation = _computation_of(model)
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        sample = self._probe()
        self._dtype = sample.dtype
        self.spec = _spec_of(model, sample, name=name, revision=revision, block_tokens=block_tokens)
        self._cache = client.attach(self.spec)
        self._buffer = PrefixBuffer(self.spec)
        self._generating = threading.Lock()

    def generate(self, input_ids: Any, **options: Any) -> Generation:
        """Changes state. As `model.generate`, for `[1, n]` token ids; ValueError names what is not supported."""
        began = now_ms()
        _refuse_call(self._model, input_ids, options)
        if _computation_of(self._model) != self._computation:
            raise ValueError("the model's weights or attention changed since CachedModel was made; make a new one")
        with self._generating:
            return self._generate(input_ids, options, began)

    def _generate(self, input_ids: Any, options: dict[str, Any], began: float) -> Generation:
        prompt: list[int] = input_ids[0].tolist()
        restore_began = now_ms()
        past = self._restore(prompt[:-1])  # the last token stays: its logits are what the engine needs
        num_cached = past.get_seq_length()
        restored = now_ms()
        first_token = FirstToken()
        criteria = transformers.StoppingCriteriaList([*(options.pop("stopping_criteria", None) or ()), first_token])
        options |= {self._cache_argument: past, "attention_mask": torch.ones_like(input_ids)}
        output = self._model.generate(input_ids, stopping_criteria=criteria, **options)
        generated = now_ms()
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        num_stored = self._store(sequences[0].tolist(), past)
        ttft_ms = first_token.came_at_ms - began
        self._cache.report(
            prefill_tokens=len(prompt) - num_cached,
            prefill_ms=first_token.came_at_ms - restored,
            ttft_ms=ttft_ms,
        )
        return Generation(
            output=output,
            sequences=sequences,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=num_cached,
            num_stored_tokens=num_stored,
            ttft_ms=ttft_ms,
            restore_ms=restored - restore_began,
            store_ms=now_ms() - generated,
        )

    def _restore(self, prefix: list[int]) -> Any:
        """A DynamicCache that holds the longest stored prefix; empty on a miss or any fault of the store.

        Its tensors lie in the buffer. That is safe until this call ends: a DynamicLayer never writes in place, the
        first forward pass concatenates them into new ones.
        """
        with self._cache.acquire(prefix) as hit:
            kv = copy_hit(hit, self._buffer)
        past = self._empty_cache()
        if kv.shape[3]:
            tensors = torch.from_numpy(kv).view(self._dtype).to(self._model.device).unsqueeze(2)
            for layer, (keys, values) in zip(past.layers, tensors, strict=True):
                layer.update(keys[..., :0, :], values[..., :0, :])  # sets dtype and device, copies nothing
                layer.keys, layer.values = keys, values
        return past

    def _store(self, token_ids: list[int], past: Any) -> int:
        """Tokens written. The last generated token has no KV yet, so the cache holds one token less than was said."""
        num_held = min(past.get_seq_length(), len(token_ids))
        with self._cache.reserve(token_ids[:num_held]) as reservation:
            num_written = write_blocks(reservation, self._gather(past, reservation.start, num_held))
            return num_written if reservation.commit() else 0

    def _gather(self, past: Any, start: int, end: int) -> KVArray:
        """`[L, 2, H, end - start, D]`, in the buffer, which nothing else uses any more."""
        gathered = self._buffer.array(end - start)
        target = torch.from_numpy(gathered).view(self._dtype)
        for index, layer in enumerate(past.layers):
            for pair, tensor in enumerate((layer.keys, layer.values)):
                assert not self._buffer.holds(tensor.data_ptr()), "the cache was not grown by concatenation"
                target[index, pair].copy_(tensor[0, :, start:end])
        return gathered

    def _empty_cache(self) -> Any:
        return transformers.DynamicCache(config=self._model.config)

    def _probe(self) -> Any:
        """`[L, 2, H, 1, D]`: the KV of one token as the model itself makes it; a config can only announce its shape."""
        cache = self._empty_cache()
        _refuse_layers(cache)
        token = torch.zeros((1, 1), dtype=torch.long, device=self._model.device)
        with torch.no_grad():
            self._model(input_ids=token, use_cache=True, **{self._cache_argument: cache})
        return _stacked(cache)


class FirstToken:
    """A stopping criterion that stops nothing: it is called once per token, right after it was chosen."""

    def __init__(self) -> None:
        self.came_at_ms = 0.0

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if not self.came_at_ms:
            int(input_ids[0, -1])  # waits for the device
            self.came_at_ms = now_ms()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def now_ms() -> float:
    """Query. Milliseconds since an arbitrary start."""
    return time.perf_counter_ns() / 1e6


# What is refused. Each function is a query and raises ValueError with the reason.


def _refuse_model(model: Any) -> None:
    if not isinstance(model, transformers.PreTrainedModel) or not model.can_generate():
        raise ValueError(f"{type(model).__name__} is no Transformers model that generates text")
    if model.config.is_encoder_decoder:
        raise ValueError("encoder-decoder models are not supported: their KV depends on more than the tokens before")
    if model.config.get_text_config(decoder=True) is not model.config:
        raise ValueError("multi-modal models are not supported: their KV depends on more than token ids")
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise ValueError("an adapter is loaded, and what is active can change unseen: merge it into the weights first")
    if len({tensor.device for _, tensor in _named_tensors(model)}) != 1:
        raise ValueError("the model's weights lie on several devices; only one device is supported")
    if model.device.type == "meta":
        raise ValueError("the model's weights are not loaded (they lie on the meta device)")
    for module in model.modules():
        kind = str(getattr(module, "rope_type", ""))
        if "dynamic" in kind or "longrope" in kind:
            raise ValueError(f"rope {kind!r} rotates keys by the length of the whole prompt: prefixes cannot be shared")


def _refuse_layers(cache: Any) -> None:
    for index, layer in enumerate(cache.layers):
        if type(layer) is not transformers.cache_utils.DynamicLayer:
            raise ValueError(
                f"layer {index} keeps a {type(layer).__name__}: sliding-window, recurrent, hybrid and quantised layers "
                "do not keep the KV of every token, so a prefix cannot be restored into them"
            )


def _refuse_call(model: Any, input_ids: Any, options: dict[str, Any]) -> None:
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        raise ValueError("input_ids must be a tensor [1, n] of token ids")
    if input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; only [1, n], one sequence, is supported")
    mask = options.pop("attention_mask", None)
    if mask is not None and (mask.shape != input_ids.shape or not bool((mask == 1).all())):
        raise ValueError("attention_mask hides tokens: padding is not supported")
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes KV; call model.eval()")
    if torch.is_autocast_enabled(model.device.type):
        raise ValueError("autocast changes the dtype of KV; load the model in the dtype it should compute in")
    _refuse_options(model, options)


def _refuse_options(model: Any, options: dict[str, Any]) -> None:
    known = transformers.GenerationConfig().to_dict().keys()
    for name in options:
        if name not in known and name not in PASSED_ON:
            raise ValueError(f"{name} is not supported: only options of generation itself, which leave KV as it is")
    settings = model.generation_config.to_dict()
    for given in (options.get("generation_config"), options):
        chosen = given.to_dict() if isinstance(given, transformers.GenerationConfig) else given or {}
        settings |= {name: value for name, value in chosen.items() if value is not None}
    for name, refused, reason in UNSUPPORTED:
        if refused(settings.get(name)):
            raise ValueError(f"{name}={settings[name]!r} is not supported: {reason}")


# What names the KV.


def _spec_of(model: Any, sample: Any, *, name: str, revision: str, block_tokens: int) -> KVSpec:
    """The spec of KV like `sample` ([L, 2, H, 1, D]) computed by this model."""
    if sample.dtype not in DTYPES:
        raise ValueError(f"KV of dtype {sample.dtype} is not supported, only {', '.join(DTYPES.values())}")
    num_layers, _, num_kv_heads, _, head_dim = sample.shape
    weights = revision or f"weights-{_digest_of_weights(model)}"
    return KVSpec(
        model=name or Path(model.name_or_path).name or model.config.model_type,
        revision=f"{weights} config-{_digest_of_config(model)} transformers-{transformers.__version__}",
        dtype=DTYPES[sample.dtype],
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
    )


def _stacked(cache: Any) -> Any:
    """`[L, 2, H, T, D]` of a cache; ValueError where its layers differ in shape or kind."""
    _refuse_layers(cache)
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    if not pairs or any(tensor is None for pair in pairs for tensor in pair):
        raise ValueError("the model does not keep its KV in the cache object it is given")
    kinds = {(tensor.shape, tensor.dtype, tensor.device) for pair in pairs for tensor in pair}
    if len(kinds) != 1:
        shapes = sorted({tuple(shape) for shape, _, _ in kinds})
        raise ValueError(f"keys and values must be alike in every layer, but this model has {shapes}")
    return torch.stack([torch.cat(pair) for pair in pairs])


def _digest_of_config(model: Any) -> str:
    """All that the config says about the computation, with the attention implementation, which rounds differently."""
    facts = {key: value for key, value in model.config.to_dict().items() if key not in PROVENANCE}
    facts |= {"class": type(model).__name__, "attention": model.config._attn_implementation}
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True, default=str).encode())


def _digest_of_weights(model: Any) -> str:
    """Over every byte of every parameter and buffer (inverse rope frequencies among them), in order of their names."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(_named_tensors(model), key=lambda named: named[0]):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _named_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _computation_of(model: Any) -> tuple[str, list[tuple[int, int]]]:
    """Changes when the attention implementation does, and when a parameter is added, replaced, moved, converted or
    written in place. What writes to `.data`, or hooks that change hidden states, are not seen."""
    parameters = [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in model.parameters()]
    return model.config._attn_implementation, parameters
