"""The wire from a stranger's side: any value that a type allows, claims of memory, a peer that is no longer read."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from kvstore.config import config_from
from kvstore.errors import ConfigInvalid
from kvstore.spec import encode_spec
from tests.daemons import BIG, SPEC, Daemon, Other, chat, holds, read, store, wait_until
from tests.sources import ROOT
from tests.wire_harness import Node, Stranger
from transports import messages as wire
from transports.errors import RemoteProtocolError

NOTHING = (0, 0, 0)
ASKED = [*get_args(wire.AnyRequest), *get_args(wire.AnyNotice)]
WIDTHS = {"hashes": 16, "tokens": 4, "slots": 4, "sums": 8}
BYTES_FEW = 80  # of a packed field: its bound is tested in test_messages


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with ExitStack() as held:
        yield Node(held)


# --- any value that a type allows


def whole(kind: inspect.IntType) -> st.SearchStrategy[int]:
    low, high = kind.ge, kind.le
    assert low is not None
    assert high is not None
    return st.sampled_from(sorted({low, min(1, high), min(2, high), min(16, high), high - 1, high})) | st.integers(
        low, high
    )


def value_of(kind: inspect.Type, name: str) -> st.SearchStrategy[Any]:
    """Query. All that a field may hold, the bounds themselves and the smallest numbers often."""
    match kind:
        case inspect.IntType():
            return whole(kind)
        case inspect.FloatType():
            high = float(kind.le or 0)
            return st.sampled_from([0.0, -0.0, 5e-324, 1e-300, 1e-9, 1.0, high]) | st.floats(0, high)
        case inspect.BytesType():
            width, most = WIDTHS.get(name, 1), kind.max_length or 0
            count = kind.min_length or st.integers(0, min(most, BYTES_FEW) // width)
            sizes = st.just(count) if isinstance(count, int) else count.map(lambda each: each * width)
            same = st.builds(lambda size, byte: bytes([byte]) * size, sizes, st.integers(0, 3))
            return same | sizes.flatmap(lambda size: st.binary(min_size=size, max_size=size))
        case inspect.StrType():
            return st.text(max_size=20) | st.just("\0" * (kind.max_length or 0))
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.UnionType():
            return st.one_of(*(value_of(each, name) for each in kind.types))
        case inspect.ListType():
            return st.lists(value_of(kind.item_type, name), max_size=4)
        case inspect.TupleType():
            slots = "slots" if name == "holds" else name
            return st.tuples(*(value_of(each, slots) for each in kind.item_types))
    raise AssertionError(f"{name}: no values for {kind}")


def draft_of(message: type[wire.Message]) -> st.SearchStrategy[tuple[type[wire.Message], dict[str, Any]]]:
    info = inspect.type_info(message)
    assert isinstance(info, inspect.StructType)
    fields = {field.name: value_of(field.type, field.name) for field in info.fields}
    small = st.sampled_from([0, 1, 2])
    often_small = ("lease", "reservation", "block", "blocks", "member", "share")
    fields |= {name: small | fields[name] for name in often_small if name in fields}
    if message is wire.Attach:
        fields["spec"] = st.sampled_from([encode_spec(SPEC), encode_spec(BIG)]) | fields["spec"]
        fields["group"] = st.sampled_from(["", "ranks"]) | fields["group"]
        few = st.sampled_from([(0, 1), (1, 2), (0, 2)])
        fields |= {name: few | fields[name] for name in ("layers", "heads")}
    return st.tuples(st.just(message), st.fixed_dictionaries(fields))


DRAFTS = st.one_of(*(draft_of(message) for message in ASKED))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(drafts=st.lists(st.tuples(DRAFTS, st.integers(0, 31)), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_any_value_that_a_type_allows_is_answered_and_breaks_nothing(
    node: Node, drafts: list[tuple[tuple[type[wire.Message], dict[str, Any]], int]], seed: int
) -> None:
    """SEC, HNG, LEK: from the types themselves, so a field of a later version is tried, too."""
    stranger = Stranger(node, random.Random(seed), [])
    for (kind, values), odd in drafts:
        if "session" in values and odd:  # mostly one that lives, and a spec that is known
            values["session"] = stranger.sessions[odd % len(stranger.sessions)]
        if "spec_id" in values and odd:
            values["spec_id"] = stranger.spec_ids[odd % len(stranger.spec_ids)]
        if kind is wire.Goodbye and values["session"] == stranger.sessions[0]:
            continue
        stranger.say(wire.decode(wire.encode(kind(**values))), fills=True)
        stranger.say(wire.GetStatus(1), fills=False)
    stranger.wait()
    node.check()
    stranger.leave()
    prompt = node.new_prompt()
    assert store(node.cache, prompt)
    assert read(node.cache, prompt) == 64
    wait_until(node.is_settled)


TIMES_MS = [5e-324, 1e-300, 1e-9, 1e-6, 1.0, wire.MS_MAX]


@pytest.mark.parametrize("tokens", [1, 1 << 48])
@pytest.mark.parametrize("ms", TIMES_MS)
def test_a_time_that_no_clock_measures_stops_nobody(node: Node, tokens: int, ms: float) -> None:
    """SEC: as reported by an engine, its rate was no number, and whoever asked for the status stopped the daemon."""
    stranger = Stranger(node, random.Random(0), [])
    for each, took_ms in ((tokens, ms), (1, ms), (tokens, wire.MS_MAX), (tokens, ms)):
        stranger.say(wire.Report(stranger.sessions[0], 1, each, took_ms, took_ms), fills=False)
        stranger.say(wire.GetStatus(1), fills=False)
    stranger.leave()
    wait_until(node.is_settled)


# --- claims of memory


CLAIMS = """
import resource, sys
from transports.errors import RemoteProtocolError
from transports.messages import decode, encode, sealed
from tests.test_wire import claims
frames = [sealed(body) for body in claims()]
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (16 << 20),) * 2)
for frame in frames:
    try:
        decode(frame)
    except RemoteProtocolError:
        continue
    sys.exit("decoded")
print(len(frames))
"""
HEADS = [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"]  # array, map, bytes, text, extension of a length in 32 bits


def claims() -> list[bytes]:
    """Query. Bodies of some 20 bytes: in each field of each message, and behind the last one, four billion of it."""
    found = [head + b"\xff\xff\xff\xff" for head in HEADS]
    for message in ASKED:
        tag: Any = message.__struct_config__.tag
        names = message.__struct_fields__
        for count in range(1, len(names) + 2):
            for head in HEADS:
                fields = [msgspec.msgpack.encode(filler_of(name)) for name in names[: count - 1]]
                found.append(bytes((0x90 | count + 1, tag)) + b"".join(fields) + head + b"\xff\xff\xff\xff")
        found.append(b"\xdd\xff\xff\xff\xff" + msgspec.msgpack.encode(tag) + b"\x01")
    return found


def filler_of(name: str) -> Any:
    """Query. What that field may hold."""
    lists = {"keys": [], "holds": [], "leases": [], "keep": False, "reason": ""}
    return lists.get(name, b"" if name in {"hashes", "tokens", "tail", "summed", "spec"} else 1)


def test_claims_of_four_billion_need_neither_memory_nor_time() -> None:
    """SEC, DSK: a process that may have no more than 16 MiB decodes them all."""
    began_s = time.monotonic()
    for body in claims():
        with pytest.raises(RemoteProtocolError, match=r"^bad \d+-byte frame: (?!it is not what was sent)"):
            wire.decode(wire.sealed(body))
    assert time.monotonic() - began_s < 1.0
    ran = subprocess.run([sys.executable, "-c", CLAIMS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{len(claims())}\n", "")
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY, "the bound was the child's alone"


@pytest.mark.parametrize(
    "opens", [b"\x91", b"\x81\x01", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01", b"\xdf\x00\x00\x00\x01\x01"]
)
@pytest.mark.parametrize("depth", [1_000, 100_000, 1_000_000])
def test_nesting_without_end_is_one_error(opens: bytes, depth: int) -> None:
    """SEC: in a field of a later version, which nobody looks at."""
    began_s = time.monotonic()
    status = wire.encode(wire.GetStatus(1))[: -wire.DIGEST_NBYTES]
    for body in (opens * depth, b"\x93" + status[1:] + opens * depth, b"\x93" + status[1:] + opens * depth + b"\x01"):
        if len(body) + wire.DIGEST_NBYTES <= wire.MESSAGE_NBYTES_MAX:
            with pytest.raises(RemoteProtocolError):
                wire.decode(wire.sealed(body))
    assert time.monotonic() - began_s < 1.0


# --- a peer that is no longer read

RUDE = """
tokens = chat(1)
assert store(cache, tokens)
hit = cache.acquire(tokens)
assert hit.wait() == 64
for _ in range(20):
    client._link._endpoint.send(b"rubbish")
say("sent"); hear()
"""


def test_the_session_of_a_peer_that_is_not_read_any_more_ends_with_its_process(own_daemon: Daemon) -> None:
    """SEC, LEK: what it holds stays its own until then, and is free after."""
    with Other(own_daemon, RUDE) as rude, own_daemon.connect() as client:
        assert rude.hear() == "sent"
        wait_until(lambda: "nothing of that connection is read any more" in own_daemon.log)
        cache = client.attach(SPEC)
        assert store(cache, chat(2))
        assert read(cache, chat(2)) == 64
        assert holds(own_daemon.status()) == (1, 0, 0)
        rude.kill()
        wait_until(lambda: holds(own_daemon.status()) == NOTHING)
        assert read(cache, chat(1)) == read(cache, chat(2)) == 64
        assert client.status()["client"]["reconnects"] == 0


@pytest.mark.parametrize("odd", ["\udcff", "\0", "\n"])
def test_a_folder_that_no_frame_can_name_is_refused(odd: str) -> None:
    """CFG, HNG: the daemon started, and the first who said hello stopped it."""
    with pytest.raises(ConfigInvalid, match=r"memory\.path=.* is no printable text"):
        config_from({"memory": {"path": f"/dev/shm/x{odd}"}})
