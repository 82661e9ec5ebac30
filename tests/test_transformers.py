"""CachedModel on a small random Llama: same tokens as without the store, or a refusal that names the reason."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the transformers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the transformers extra is not installed")

import kvstore  # noqa: E402
from benchmarks.daemon import Daemon  # noqa: E402
from benchmarks.engine import KeptCaches, answer_cached, answer_plain  # noqa: E402
from connectors.common import PrefixBuffer, copy_hit  # noqa: E402
from connectors.transformers import CachedModel  # noqa: E402

BLOCK_TOKENS = 16
ANSWER_TOKENS = 12
VOCABULARY = 211
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def small_model(*, seed: int = 0, dtype: Any = torch.float32, kind: str = "Llama", **config: Any) -> Any:
    torch.manual_seed(seed)
    made = getattr(transformers, f"{kind}Config")(**SIZES | config)
    return getattr(transformers, f"{kind}ForCausalLM")(made).to(dtype).eval()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, length)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model only waits at barriers, and long beside another busy process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


@pytest.fixture
def client() -> Iterator[kvstore.Client]:
    with kvstore.open({"memory": {"capacity": "64MiB"}}) as opened:
        yield opened


@pytest.fixture
def cached(model: Any, client: kvstore.Client) -> CachedModel:
    return CachedModel(model, client, block_tokens=BLOCK_TOKENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_restored_kv_continues_like_transformers_own_cache(client: kvstore.Client, dtype: Any) -> None:
    """The oracle keeps the cache object itself, so equal tokens over many turns mean equal bits."""
    model = small_model(dtype=dtype)
    cached, kept = CachedModel(model, client, block_tokens=BLOCK_TOKENS), KeptCaches(model)
    prompt = prompt_of(50)
    for turn in range(4):
        past = kept.cropped(prompt)
        oracle = answer_plain(model, prompt, ANSWER_TOKENS, past)
        kept.keep(0, oracle.token_ids, past)
        warm = answer_cached(cached, prompt, ANSWER_TOKENS)
        assert warm.token_ids == oracle.token_ids
        assert warm.num_cached_tokens == oracle.num_cached_tokens
        prompt = warm.token_ids + prompt_of(9, seed=turn)


def test_a_repeated_prompt_gives_the_cold_tokens(cached: CachedModel, model: Any) -> None:
    cold = answer_plain(model, prompt_of(50), ANSWER_TOKENS)
    first = answer_cached(cached, prompt_of(50), ANSWER_TOKENS)
    second = answer_cached(cached, prompt_of(50), ANSWER_TOKENS)
    assert first.token_ids == second.token_ids == cold.token_ids
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 49)  # the last prompt token is computed


def test_generated_tokens_hit_in_the_next_turn(cached: CachedModel) -> None:
    spoken = answer_cached(cached, prompt_of(50), ANSWER_TOKENS).token_ids
    following = answer_cached(cached, spoken + prompt_of(5, seed=1), ANSWER_TOKENS)
    assert following.num_cached_tokens == len(spoken) - 1  # the last generated token has no KV yet


def test_a_prompt_that_leaves_a_block_in_its_middle_hits_up_to_there(cached: CachedModel, model: Any) -> None:
    answer_cached(cached, prompt_of(50), ANSWER_TOKENS)
    for num_shared in (1, 15, 16, 17, 40):
        other = VOCABULARY - 1 - prompt_of(50)[num_shared]
        fork = [*prompt_of(num_shared), other, *prompt_of(20, seed=num_shared)]
        warm = answer_cached(cached, fork, ANSWER_TOKENS)
        assert warm.num_cached_tokens == num_shared
        assert warm.token_ids == answer_plain(model, fork, ANSWER_TOKENS).token_ids


def test_another_engine_hits_what_the_first_stored(client: kvstore.Client, cached: CachedModel) -> None:
    spoken = answer_cached(cached, prompt_of(50), ANSWER_TOKENS).token_ids
    other = CachedModel(small_model(), client, block_tokens=BLOCK_TOKENS)
    assert answer_cached(other, [*spoken, 1, 2], ANSWER_TOKENS).num_cached_tokens == len(spoken) - 1


def test_other_weights_config_or_attention_never_hit(client: kvstore.Client, cached: CachedModel) -> None:
    answer_cached(cached, prompt_of(50), ANSWER_TOKENS)
    tuned = small_model()
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3  # one number of one matrix
    for other in (
        small_model(seed=1),
        tuned,
        small_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        small_model(rms_norm_eps=1e-5),
        small_model(attn_implementation="eager"),
    ):
        missing = CachedModel(other, client, block_tokens=BLOCK_TOKENS)
        assert answer_cached(missing, prompt_of(50), ANSWER_TOKENS).num_cached_tokens == 0


def test_a_revision_replaces_the_digest_of_the_weights_only(client: kvstore.Client) -> None:
    one, other, eager = (
        CachedModel(small_model(seed=seed, **config), client, name="m", revision="abc", block_tokens=BLOCK_TOKENS).spec
        for seed, config in ((0, {}), (1, {}), (0, {"attn_implementation": "eager"}))
    )
    assert one == other != eager


@pytest.mark.parametrize("length", [1, 2, BLOCK_TOKENS, BLOCK_TOKENS + 1])
def test_short_prompts(cached: CachedModel, model: Any, length: int) -> None:
    cold = answer_plain(model, prompt_of(length), 1)
    for num_cached in (0, length - 1):
        warm = answer_cached(cached, prompt_of(length), 1)
        assert (warm.token_ids, warm.num_cached_tokens) == (cold.token_ids, num_cached)


def test_options_of_generation_pass_through(cached: CachedModel, model: Any) -> None:
    input_ids = torch.tensor([prompt_of(50)])
    options = {"max_new_tokens": 8, "do_sample": True, "top_k": 20, "return_dict_in_generate": True}
    stop = transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(max_length=55)])
    torch.manual_seed(5)
    cold = model.generate(input_ids, stopping_criteria=stop, output_scores=True, **options)
    for _ in range(2):
        torch.manual_seed(5)
        warm = cached.generate(input_ids, stopping_criteria=stop, output_scores=True, **options)
        assert torch.equal(warm.sequences, cold.sequences)
        assert len(warm.output.scores) == len(cold.scores) == 5
    assert len(stop) == 1  # the caller's list is not ours to change


def test_the_result_accounts_for_the_call(cached: CachedModel) -> None:
    made = cached.generate(torch.tensor([prompt_of(50)]), max_new_tokens=ANSWER_TOKENS, do_sample=False)
    assert made.sequences.shape == (1, 62)
    assert (made.num_prompt_tokens, made.num_cached_tokens, made.num_stored_tokens) == (50, 0, 61)
    assert made.ttft_ms > made.restore_ms > 0
    again = cached.generate(torch.tensor([prompt_of(50)]), max_new_tokens=ANSWER_TOKENS, do_sample=False)
    assert again.num_stored_tokens == 0


def test_a_full_store_costs_hits_and_nothing_else(model: Any) -> None:
    with kvstore.open({"memory": {"capacity": "4MiB"}}) as client:
        cached = CachedModel(model, client, block_tokens=256)
        for seed in range(16):
            prompt = prompt_of(400, seed)
            assert answer_cached(cached, prompt, 3).token_ids == answer_plain(model, prompt, 3).token_ids
        assert client.status()["daemon"]["memory"]["blocks_evicted"] > 0


def test_a_daemon_that_dies_is_a_miss_and_comes_back(model: Any) -> None:
    cold = answer_plain(model, prompt_of(50), ANSWER_TOKENS)
    with Daemon("64MiB") as daemon, kvstore.connect(daemon.address) as client:
        cached = CachedModel(model, client, block_tokens=BLOCK_TOKENS)
        assert answer_cached(cached, prompt_of(50), ANSWER_TOKENS).token_ids == cold.token_ids
        assert answer_cached(cached, prompt_of(50), ANSWER_TOKENS).num_cached_tokens == 49
        daemon.kill()
        for _ in range(3):
            alone = answer_cached(cached, prompt_of(50), ANSWER_TOKENS)
            assert (alone.token_ids, alone.num_cached_tokens) == (cold.token_ids, 0)
        daemon.start()
        give_up_at = time.monotonic() + 20
        while not client.status()["available"]:
            assert time.monotonic() < give_up_at
        answer_cached(cached, prompt_of(50), ANSWER_TOKENS)
        back = answer_cached(cached, prompt_of(50), ANSWER_TOKENS)
        assert (back.token_ids, back.num_cached_tokens) == (cold.token_ids, 49)


def test_a_daemon_killed_while_an_answer_is_made(model: Any) -> None:
    with Daemon("64MiB") as daemon, kvstore.connect(daemon.address) as client:
        cached = CachedModel(model, client, block_tokens=BLOCK_TOKENS)
        answer_cached(cached, prompt_of(50), ANSWER_TOKENS)

        def kill(input_ids: Any, scores: Any, **_: Any) -> Any:
            daemon.kill()
            return torch.zeros(1, dtype=torch.bool)

        made = cached.generate(
            torch.tensor([prompt_of(50)]), max_new_tokens=4, do_sample=False, stopping_criteria=[kill]
        )
        assert (made.num_cached_tokens, made.num_stored_tokens) == (49, 0)
        assert made.sequences[0].tolist() == answer_plain(model, prompt_of(50), 4).token_ids


class HalfVerified:
    """A hit whose second block turns out damaged."""

    num_tokens = 8

    def __init__(self, block: Any) -> None:
        self._block = block

    def blocks(self, deadline_ms: float) -> Iterator[Any]:
        yield self._block

    def wait(self) -> int:
        return 4


def test_only_verified_tokens_are_restored() -> None:
    spec = kvstore.KVSpec(model="m", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=2, block_tokens=4)
    block = type("", (), {"start": 0, "num_tokens": 4, "array": np.full(spec.array_shape(4), 7, np.float32)})
    hit: Any = HalfVerified(block)
    kv = copy_hit(hit, PrefixBuffer(spec))
    assert kv.shape == spec.array_shape(4)
    assert (kv == 7).all()


# What is refused


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
        ({"use_cache": False}, "use_cache"),
        ({"cache_implementation": "quantized"}, "cache_implementation"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"cache_implementation": "paged"}, "cache_implementation"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"generation_config": "beams"}, "num_beams"),
        ({"past_key_values": "a cache"}, "past_key_values"),
        ({"cache": "a cache"}, "cache is not supported"),
        ({"inputs_embeds": "a tensor"}, "inputs_embeds"),
        ({"position_ids": "a tensor"}, "position_ids"),
        ({"pixel_values": "a tensor"}, "pixel_values"),
        ({"assistant_model": "a model"}, "assistant_model"),
        ({"custom_generate": "a repository"}, "custom_generate"),
    ],
    ids=str,
)
def test_options_that_cannot_be_served_are_refused(cached: CachedModel, options: dict[str, Any], reason: str) -> None:
    if "generation_config" in options:
        options = {"generation_config": transformers.GenerationConfig(num_beams=4)}
    with pytest.raises(ValueError, match=reason):
        cached.generate(torch.tensor([prompt_of(5)]), max_new_tokens=2, **options)


def test_a_default_of_the_model_is_refused_like_an_option(client: kvstore.Client) -> None:
    model = small_model()
    model.generation_config.num_beams = 3
    cached = CachedModel(model, client)
    with pytest.raises(ValueError, match="num_beams"):
        cached.generate(torch.tensor([prompt_of(5)]))
    cached.generate(torch.tensor([prompt_of(5)]), max_new_tokens=1, num_beams=1)


@pytest.mark.parametrize(
    ("input_ids", "mask", "reason"),
    [
        (torch.zeros((2, 5), dtype=torch.long), None, "one sequence"),
        (torch.zeros((1, 0), dtype=torch.long), None, "one sequence"),
        (torch.zeros(5, dtype=torch.long), None, "tensor"),
        ([[1, 2, 3]], None, "tensor"),
        (torch.zeros((1, 3), dtype=torch.long), torch.tensor([[0, 1, 1]]), "padding"),
        (torch.zeros((1, 3), dtype=torch.long), torch.ones((1, 2)), "padding"),
    ],
)
def test_inputs_that_cannot_be_served_are_refused(cached: CachedModel, input_ids: Any, mask: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        cached.generate(input_ids, attention_mask=mask, max_new_tokens=2)


def test_a_model_in_training_and_autocast_are_refused(cached: CachedModel, model: Any) -> None:
    input_ids = torch.tensor([prompt_of(5)])
    model.train()
    with pytest.raises(ValueError, match="training"):
        cached.generate(input_ids, max_new_tokens=2)
    model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        cached.generate(input_ids, max_new_tokens=2)


def tune(model: Any) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[7] += 1


@pytest.mark.parametrize(
    "change", [tune, lambda model: model.to(torch.bfloat16), lambda model: model.set_attn_implementation("eager")]
)
def test_a_model_that_changed_since_is_refused(client: kvstore.Client, change: Any) -> None:
    model = small_model()
    cached = CachedModel(model, client)
    change(model)
    with pytest.raises(ValueError, match="changed since"):
        cached.generate(torch.tensor([prompt_of(5)]), max_new_tokens=2)


def model_that_sees() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    config = transformers.LlavaConfig(vision_config=vision, text_config=transformers.LlamaConfig(**SIZES))
    return transformers.LlavaForConditionalGeneration(config).eval()


def unloaded_model() -> Any:
    with torch.device("meta"):
        return small_model()


def model_with_adapter() -> Any:
    model = small_model()
    model._hf_peft_config_loaded = True
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: small_model(kind="Mistral", sliding_window=8), "sliding-window"),
        (
            lambda: small_model(kind="Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "layer 1 keeps",
        ),
        (lambda: small_model(kind="Mamba"), "recurrent"),
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
            ).eval(),
            "encoder-decoder",
        ),
        (
            lambda: small_model(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "length of the whole prompt",
        ),
        (lambda: small_model(dtype=torch.float64), "float64"),
        (model_that_sees, "multi-modal"),
        (unloaded_model, "meta"),
        (model_with_adapter, "adapter"),
        (lambda: torch.nn.Linear(2, 2), "no Transformers model"),
    ],
    ids=[
        "sliding",
        "hybrid",
        "recurrent",
        "encoder-decoder",
        "rope",
        "dtype",
        "multi-modal",
        "meta",
        "adapter",
        "other",
    ],
)
def test_models_that_cannot_be_served_are_refused(client: kvstore.Client, make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CachedModel(make(), client)
