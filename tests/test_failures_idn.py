"""Hits that should not be, and misses that should be hits: failures that users of such systems reported, in miniature.

docs/failures.md says which report each test stands for.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from kvstore import Client, KVSpec
from kvstore.service.prompt import ExtraKeys, Prompt
from radix import HASH_NBYTES, HashKind, hash_block, hash_prefix, root_hash, token_bytes
from tests.daemons import SPEC, read, store
from tests.sources import LEVELS, ROOT, parse, source_files

MLA = KVSpec(model="mla", dtype="bfloat16", num_layers=3, latent_dim=8, block_tokens=16)
OPAQUE = KVSpec(
    model="own", dtype="uint8", num_layers=2, block_tokens=16, layout="engine-x", token_nbytes=100, grain_tokens=4
)
SALTED = msgspec.structs.replace(SPEC, tenant_salt="salt", adapter="digest")
FIELDS = [field.name for field in msgspec.structs.fields(KVSpec)]
TOKENS = [7] * 64
Fingerprint = Callable[[KVSpec], bytes]


def fingerprint_of(spec: KVSpec) -> bytes:
    return spec.fingerprint


def changed(spec: KVSpec, name: str) -> KVSpec:
    value = getattr(spec, name)
    return msgspec.structs.replace(spec, **{name: value + 1 if isinstance(value, int) else value + "x"})


def cut(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_NBYTES] for at in range(0, len(hashes), HASH_NBYTES)]


def names_of(spec: KVSpec, fingerprint: Fingerprint) -> set[bytes]:
    """Query. Names of the blocks of one prompt, of both kinds; blocks are cut alike, whatever the spec says."""
    tokens = token_bytes(TOKENS)
    return {
        name for kind in HashKind for name in cut(hash_prefix(root_hash(fingerprint(spec), kind), tokens, 16, kind))
    }


def fields_that_do_not_count(spec: KVSpec, fingerprint: Fingerprint) -> set[str]:
    """Query. Fields with another value of which some block would have the same name."""
    names = names_of(spec, fingerprint)
    return {field for field in FIELDS if not names.isdisjoint(names_of(changed(spec, field), fingerprint))}


@pytest.mark.parametrize("spec", [SPEC, MLA, OPAQUE, SALTED], ids=["heads", "latent", "opaque", "salted"])
def test_one_field_alone_gives_every_block_another_name(spec: KVSpec) -> None:
    """IDN: any field, also one that is added tomorrow; and no two changes meet either."""
    assert fields_that_do_not_count(spec, fingerprint_of) == set()
    specs = [spec, *(changed(spec, field) for field in FIELDS)]
    assert len(set().union(*(names_of(each, fingerprint_of) for each in specs))) == 8 * len(specs)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_not_hashed_would_be_seen(field: str) -> None:
    """IDN: the proof that the test above can fail, for each field."""

    def forgetful(spec: KVSpec) -> bytes:
        facts = msgspec.structs.asdict(spec)
        del facts[field]
        return hashlib.sha256(msgspec.msgpack.encode(sorted(facts.items()))).digest()

    assert fields_that_do_not_count(SPEC, forgetful) == {field}


def names_with(keys: ExtraKeys, spec: KVSpec = SPEC) -> list[bytes]:
    return cut(Prompt(spec, HashKind.XXH3, TOKENS, keys).hashes)


@pytest.mark.parametrize("start", [0, 1, 15, 16, 33, 63])
def test_digests_of_adapters_and_images_part_the_names_from_the_block_they_touch(start: int) -> None:
    """IDN: none, one, another, a longer one; as many tokens, the very same ones. Before that block, all is shared."""
    chains = [names_with([])]
    chains += [names_with([(start, digest)]) for digest in (b"\0", b"\0\0", b"a" * 32, b"b" * 32, b"a" * 31 + b"b")]
    first = start // 16
    for block in range(4):
        names = {chain[block] for chain in chains}
        assert len(names) == (1 if block < first else len(chains))


def test_one_adapter_name_with_other_weights_is_another_model() -> None:
    """IDN: and no adapter is not an adapter without a name, whichever way an engine says it."""
    said = [(SPEC, []), (SPEC, [b""]), (SPEC, [b"sql"]), (SPEC, [b"sql@1"]), (SPEC, [b"sql@2"])]
    said += [(msgspec.structs.replace(SPEC, adapter=name), []) for name in ("sql", "sql@1", "sql@2")]
    names = [set(names_with(keys, spec)) for spec, keys in said]
    assert len(set().union(*names)) == 4 * len(said)


def test_a_million_image_digests_give_a_million_names() -> None:
    """IDN: digests are hashed at full width. Its twin: at the width of a token id they do collide."""
    tokens, parent = token_bytes(TOKENS[:16]), bytes(HASH_NBYTES)
    drawn = random.Random(1).randbytes(16 << 20)
    digests = [drawn[at : at + 16] for at in range(0, len(drawn), 16)]
    assert len({digest[:4] for digest in digests}) < 1 << 20
    assert len({hash_block(parent, tokens, ((3, digest),), HashKind.XXH3) for digest in digests}) == 1 << 20


def test_16_threads_with_an_image_each_see_their_own(client: Client) -> None:
    """IDN: the same placeholder tokens; each stores and reads KV that no other has, all at once."""
    cache, ready = client.attach(SPEC), threading.Barrier(16)

    def work(image: int) -> list[int]:
        found, mine = [], [(0, image.to_bytes(16, "big"))]
        ready.wait(10)
        for count in (64, 40, 64, 16, 64):
            store(cache, TOKENS[:count], salt=image, extra_keys=mine)
            found.append(read(cache, TOKENS[:count], salt=image, extra_keys=mine))
        return found

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(work, range(16))) == [[64, 40, 64, 16, 64]] * 16
    assert cache.match(TOKENS) == 0


# --- misses that should be hits

CHILD = """
import json, sys
from kvstore import KVSpec
from kvstore.service.prompt import Prompt
from radix import HashKind, hash_prefix, normalise_keys, root_hash, token_bytes

given = json.load(sys.stdin)
tokens, keys = token_bytes(given["tokens"]), normalise_keys([(at, bytes.fromhex(key)) for at, key in given["keys"]])
said = {}
for kind in HashKind:
    root = root_hash(bytes.fromhex(given["fingerprint"]), kind)
    plain = hash_prefix(root, tokens, given["block_tokens"], kind)
    said[kind.value] = [root.hex(), plain.hex(), hash_prefix(root, tokens, given["block_tokens"], kind, keys).hex()]
    spec = KVSpec(model="m", dtype="bfloat16", num_layers=2, num_kv_heads=2, head_dim=8, block_tokens=16)
    said[f"prompt {kind.value}"] = Prompt(spec, kind, range(100), [b"lora", (40, b"image")]).hashes.hex()
json.dump(said, sys.stdout, sort_keys=True)
"""


def test_20_processes_in_20_environments_give_every_block_the_same_name() -> None:
    """HSH: random seeds for hash(), other languages, time zones, folders; and the names are those in the repository."""
    text = (ROOT / "tests/vectors/block_hashes.json").read_text()
    variables = [
        {"PYTHONHASHSEED": "0"},
        {"PYTHONHASHSEED": "1"},
        {"LC_ALL": "C"},
        {"LANG": "tr_TR.UTF-8"},
        {"TZ": "UTC+9"},
    ]
    variables += [{"PYTHONUTF8": "0"}, {"OMP_NUM_THREADS": "1"}, {}, {}, {}]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=(ROOT, "/")[number % 2],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONHASHSEED": "random",
                **variables[number % len(variables)],
            },
        )
        for number in range(20)
    ]
    answers = {child.communicate(text, timeout=60)[0] for child in children}
    assert [child.returncode for child in children] == [0] * 20
    (answer,) = answers
    said, golden = json.loads(answer), json.loads(text)["kinds"]
    for kind, names in golden.items():
        assert said[kind] == [names["root"], "".join(names["hashes"]), "".join(names["hashes_with_keys"])]


def calls_of_hash(tree: ast.Module) -> list[int]:
    """Query. Lines where Python's own hash() is asked, or an object's __hash__."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash")
        or (isinstance(node, ast.Attribute) and node.attr == "__hash__")
    ]


def test_no_name_can_come_from_pythons_own_hash() -> None:
    """HSH: hash(None) is an address, hash("x") a seed of the process. Nothing that we ship asks for either."""
    found = {file: lines for file in source_files(*LEVELS) if (lines := calls_of_hash(parse(file)))}
    assert found == {}
    assert calls_of_hash(ast.parse("x = hash((None, 1))\ny = a.__hash__()")) == [1, 2]


def test_all_tests_of_names_pass_whatever_the_seed() -> None:
    """HSH: no variable is a cure, since none is needed."""
    files = ["tests/test_hashing.py", "tests/test_prompt.py", "tests/test_spec.py"]
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not processes", *files],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("random", "0")
    ]
    said = [run.communicate(timeout=100)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
