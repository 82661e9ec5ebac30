"""How a prompt is cut and named: what the index, the header and the daemon are told of one and the same block."""

import random

import numpy as np
import pytest

import kvstore.service.prompt as prompt_module
from kvstore import KVSpec
from kvstore.core.layout import Header, parse_header
from kvstore.service.prompt import PROMPTS_KEPT, TOKENS_KEPT, Prompt, RecentPrompts
from radix import HashKind, block_symbols_of, keys_digest, root_hash
from tests.daemons import SPEC
from tests.models import page_of
from transports.messages import BLOCKS_MAX, TOKENS_MAX

OPAQUE = KVSpec(
    model="m", dtype="uint8", num_layers=2, block_tokens=16, layout="engine-x", token_nbytes=10, grain_tokens=4
)


def hashes_of(prompt: Prompt) -> list[bytes]:
    return [prompt.block_hash(number) for number in range(prompt.num_blocks)]


def prompt_of(num_tokens: int, extra_keys: object = (), spec: KVSpec = SPEC, kind: HashKind = HashKind.XXH3) -> Prompt:
    return Prompt(spec, kind, list(range(num_tokens)), extra_keys)  # type: ignore[arg-type]


def num_common(a: Prompt, b: Prompt) -> int:
    pairs = zip(hashes_of(a), hashes_of(b), strict=True)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), a.num_blocks)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "tail_tokens"), [(0, 0, 0), (1, 1, 1), (15, 1, 15), (16, 1, 0), (17, 2, 1), (48, 3, 0)]
)
def test_the_last_block_may_be_short(num_tokens: int, num_blocks: int, tail_tokens: int) -> None:
    """CFG: L#4109, a prompt shorter than a block is one too."""
    prompt = prompt_of(num_tokens)
    assert (prompt.num_tokens, prompt.num_blocks, len(prompt.tail)) == (num_tokens, num_blocks, 4 * tail_tokens)
    assert len(prompt.hashes) == 16 * num_blocks


def test_blocks_form_a_chain_from_the_root_of_the_spec() -> None:
    """HSH."""
    prompt = prompt_of(40)
    parents = [prompt.identity(number).parent for number in range(3)]
    assert parents == [root_hash(SPEC.fingerprint, HashKind.XXH3), *hashes_of(prompt)[:2]]
    assert [prompt.identity(number).number for number in range(3)] == [0, 1, 2]
    assert [len(prompt.identity(number).tokens) for number in range(3)] == [64, 64, 32]


@pytest.mark.parametrize("kind", list(HashKind))
@pytest.mark.parametrize("extra_keys", [(), [b"image"], [(20, b"image"), (21, b"other")]])
def test_the_header_of_a_block_says_what_the_index_matches(kind: HashKind, extra_keys: object) -> None:
    """COR: symbols made from the header equal those made from the prompt."""
    prompt = prompt_of(40, extra_keys, kind=kind)
    for number in range(prompt.num_blocks):
        header = parse_header(page_of(Header(prompt.identity(number), 1, 1, ())))
        assert header is not None
        stored = header.identity
        assert stored == prompt.identity(number)
        assert block_symbols_of(stored.tokens, stored.keys_start, stored.keys_digest) == prompt.symbols(number)


def test_key_facts_name_each_block_with_keys_once() -> None:
    """IDN."""
    prompt = prompt_of(64, [b"salt", (33, b"image"), (40, b"second"), (70, b"beyond the prompt")])
    assert [start for start, _ in prompt.key_facts] == [0, 33]
    assert prompt.key_facts[0][1] == keys_digest(((0, b"salt"),))
    assert prompt.key_facts[1][1] == keys_digest(((1, b"image"), (8, b"second")))


def test_two_images_over_one_placeholder_part_at_the_block_they_touch() -> None:
    """IDN: L#690."""
    one, other = prompt_of(64, [(20, b"digest-1")]), prompt_of(64, [(20, b"digest-2")])
    assert num_common(one, other) == 1
    assert num_common(one, prompt_of(64)) == 1
    assert set(hashes_of(one)[1:]).isdisjoint(hashes_of(other))


@pytest.mark.parametrize("start", [0, 15, 16, 31, 63])
def test_a_key_counts_from_the_block_that_holds_its_token(start: int) -> None:
    """IDN."""
    assert num_common(prompt_of(64, [(start, b"k")]), prompt_of(64)) == start // 16


def test_every_field_that_names_the_bytes_parts_the_chain_at_once() -> None:
    """IDN: L#44250, V#30931, V#3264."""
    specs = [
        SPEC,
        KVSpec(**(vars_of(SPEC) | {"adapter": "digest-1"})),
        KVSpec(**(vars_of(SPEC) | {"adapter": "digest-2"})),
        KVSpec(**(vars_of(SPEC) | {"tenant_salt": "a"})),
        KVSpec(**(vars_of(SPEC) | {"revision": "2"})),
        KVSpec(**(vars_of(SPEC) | {"kv_scales": "per-tensor:1"})),
    ]
    names = [each for spec in specs for each in hashes_of(prompt_of(64, spec=spec))]
    assert len(set(names)) == len(names)


def vars_of(spec: KVSpec) -> dict[str, object]:
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


def test_the_kind_of_hash_parts_the_chain() -> None:
    """SEC: a forged XXH3 name names nothing where SHA-256 is used."""
    xxh3, sha256 = (prompt_of(64, kind=kind) for kind in HashKind)
    assert set(hashes_of(xxh3)).isdisjoint(hashes_of(sha256))


def test_opaque_layouts_are_cut_to_whole_grains() -> None:
    """COR: an engine's own layout is usable at multiples of its block only."""
    assert [prompt_of(count, spec=OPAQUE).num_tokens for count in (3, 4, 7, 16, 19, 20)] == [0, 4, 4, 16, 16, 20]


def test_what_exceeds_the_protocol_is_left_out() -> None:
    """CFG: it may be forgotten; it must not be an error."""
    assert prompt_of(TOKENS_MAX + 5).num_tokens == TOKENS_MAX
    one_each = KVSpec(model="m", dtype="uint8", num_layers=1, head_dim=1, block_tokens=1)
    longest = prompt_of(BLOCKS_MAX + 5, spec=one_each)
    assert (longest.num_tokens, longest.num_blocks) == (BLOCKS_MAX, BLOCKS_MAX)


@pytest.mark.parametrize("make", [list, tuple, np.array, lambda ids: np.array(ids, np.int32), lambda ids: ids])
def test_token_ids_may_come_in_any_integer_sequence(make: object) -> None:
    """HSH."""
    assert Prompt(SPEC, HashKind.XXH3, make(range(40)), ()).hashes == prompt_of(40).hashes  # type: ignore[operator]


@pytest.mark.parametrize("bad", [[-1], [1 << 32], [0xFFFFFFFF], np.zeros((2, 2), int)])
def test_what_no_token_can_be_is_a_value_error(bad: object) -> None:
    """CFG."""
    with pytest.raises(ValueError, match="token ids"):
        Prompt(SPEC, HashKind.XXH3, bad, ())


@pytest.mark.parametrize("bad", ["text", b"bytes", [1.5], np.zeros(3), None, 7])
def test_what_is_no_sequence_of_integers_is_a_type_error(bad: object) -> None:
    """CFG."""
    with pytest.raises(TypeError):
        Prompt(SPEC, HashKind.XXH3, bad, ())


# --- what recent prompts know


def everything(prompt: Prompt) -> list[object]:
    rows = prompt.whole_identities
    named = None if rows is None else rows.tobytes()
    return [prompt.hashes, prompt.contexts, named, prompt.identities(0), prompt.tail, prompt.key_facts]


def grown(rng: random.Random, old: list[int]) -> list[int]:
    """Query. Tokens that go on from others, leave them midway, are the same, or begin anew."""
    kept = old[: rng.choice((len(old), rng.randint(0, len(old))))]
    return kept + [rng.randrange(3) for _ in range(rng.choice((0, 1, 16, rng.randint(0, 60))))]


@pytest.mark.parametrize("kind", list(HashKind))
@pytest.mark.parametrize("seed", range(8))
def test_a_prompt_that_goes_on_from_another_is_the_prompt(seed: int, kind: HashKind) -> None:
    """HSH, IDN: whatever it shares with which, and whatever that had made by then."""
    rng, recent, prompts = random.Random(seed), RecentPrompts(), [[1, 2, 0]]
    for _ in range(150):
        tokens = grown(rng, rng.choice(prompts[-12:]))
        prompts.append(tokens)
        keys = sorted({(rng.randrange(80), rng.choice((b"a", b"b"))) for _ in range(rng.choice((0, 0, 1, 2)))})
        fresh, met = Prompt(SPEC, kind, tokens, keys), recent.met(Prompt(SPEC, kind, tokens, keys))
        assert met.hashes == fresh.hashes
        if rng.random() < 0.3:
            assert met.contexts == fresh.contexts
        if rng.random() < 0.6:
            first = rng.randint(0, met.num_blocks)
            assert met.identities(first) == fresh.identities(first)
            assert everything(met) == everything(fresh)


def test_the_same_prompt_is_the_same_object_and_the_next_turn_takes_its_place() -> None:
    """LEK: a chat is one prompt here, however many turns it has."""
    recent = RecentPrompts()
    first = recent.met(prompt_of(40))
    assert recent.met(prompt_of(40)) is first
    assert recent.met(prompt_of(40, [b"lora"])) is not first
    for length in range(40, 400, 7):
        recent.met(prompt_of(length))
    assert len(recent._prompts) <= 3


def test_a_short_prompt_met_since_does_not_hide_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """PRF: what was hashed of a chat is not hashed again because its first block was asked for alone."""
    recent = RecentPrompts()
    recent.met(prompt_of(640))
    recent.met(prompt_of(16))
    hashed: list[int] = []
    real = prompt_module.hash_prefix
    monkeypatch.setattr(
        prompt_module, "hash_prefix", lambda *how, **more: hashed.append(len(how[1])) or real(*how, **more)
    )
    assert recent.met(prompt_of(656)).hashes == prompt_of(656).hashes
    assert hashed[0] == 4 * 16, "the new block alone"


def test_recent_prompts_are_few_and_not_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """LEK."""
    recent = RecentPrompts()
    for first in range(3 * PROMPTS_KEPT):
        recent.met(Prompt(SPEC, HashKind.XXH3, [first] * 40, ()))
    assert len(recent._prompts) == PROMPTS_KEPT
    monkeypatch.setattr("kvstore.service.prompt.TOKENS_KEPT", 100)
    recent.met(Prompt(SPEC, HashKind.XXH3, [77] * 40, ()))
    assert len(recent._prompts) == 2
    recent.met(Prompt(SPEC, HashKind.XXH3, [78] * 101, ()))
    assert not recent._prompts, "longer than all that may be kept"
    assert TOKENS_KEPT >= 131_072


def test_a_salted_spec_shares_nothing_with_another() -> None:
    """IDN: one cache has one spec, but who asks is not asked."""
    recent, salted = (
        RecentPrompts(),
        KVSpec(
            model="tiny", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=16, block_tokens=16, tenant_salt="x"
        ),
    )
    recent.met(prompt_of(64))
    assert recent.met(prompt_of(64, spec=salted)).hashes == prompt_of(64, spec=salted).hashes
