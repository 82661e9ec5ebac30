"""The control protocol between a client and the daemon of its node, version 1.

Grammar (one ZeroMQ message each way):

    frame     = body digest              ; XXH3-64 of the body, u64 little-endian: what flips on the way is dropped
    body      = one MessagePack array, its first element the tag
    session   = hello welcome *exchange [goodbye]
    exchange  = request reply            ; exactly one terminal reply per request, from the dispatcher
              / notice                   ; one-way, never answered
    request   = hello / attach / find / acquire / wait / reserve / commit / clear / status / carry
    reply     = welcome / attached / found / acquired / loaded / reserved / committed / done / state / failed
    notice    = release / abort / discard / prefetch / report / goodbye

- Order: messages of one connection are handled in the order sent. A client that stopped waiting for `acquired`
  therefore sends `release` with the same lease id and leaves nothing behind.
- Ids: `request_id`, `lease` and `reservation` are chosen by the client, unique within its session; a repeated
  `acquire` or `reserve` with a living id is answered from that lease or reservation, not done twice.
- Loads: `acquired` names slots whose bytes may still be on their way from a lower tier; its first `ready` blocks are
  there. `wait` is answered by `loaded` once as many blocks as asked for are there, once no more will come, or after
  `wait_ms`, whatever is first.
- Ranks: an `attach` that names a group gives the session a place in it (`member`). `reserve` with a place joins what
  another rank of the group has begun for the same chain, or begins it; the blocks are sealed by the `commit` that makes
  the ranks' parts whole, and given up for all by the first `abort`, or by the end of a rank's session.
- Shared leases: `acquired` may carry a `share`. Any process of the node may read on under that number, without a
  message, while it holds a shared record lock on byte `share` of the sessions file; the daemon holds all those bytes
  exclusively, but for the shares of leases that live or are still read.
- Restart: a client that finds a new daemon on the slab it has mapped sends `carry` with all it still holds, in as many
  requests as that takes, before it lets the old session's byte go; until then nothing it may look at is reused.
- Liveness: a session lives as long as its process holds a POSIX record lock on byte `session & 0xffff` of the
  sessions file; the daemon needs no heartbeat. "Reliable" covers a killed or stopped process on either side,
  and a lost connection; it does not cover a machine that lies about locks.
- Data never travels here: hashes, slots and leases do; bytes lie in the slab that both sides map.

Packed fields: `hashes` 16 bytes each; `tokens` and `slots` u32 little-endian; flags one byte per block.
"""

from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta, Struct

from transports.errors import LocalProtocolError, RemoteProtocolError

VERSION_MIN = 1
VERSION_MAX = 1

BLOCKS_MAX = 65536
TOKENS_MAX = 1 << 20
KEYS_MAX = 1024
LEASES_PER_NOTICE_MAX = 4096
SPEC_NBYTES_MAX = 65536
MESSAGE_NBYTES_MAX = 8 << 20  # of a frame
DIGEST_NBYTES = 8
SECONDS_MAX = 1e9
MS_MAX = 1e12

Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
SpecId = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=0, le=(1 << 48))]
Hashes = Annotated[bytes, Meta(max_length=16 * BLOCKS_MAX)]
Tokens = Annotated[bytes, Meta(max_length=4 * TOKENS_MAX)]
Slots = Annotated[bytes, Meta(max_length=4 * BLOCKS_MAX)]
Flags = Annotated[bytes, Meta(max_length=BLOCKS_MAX)]
Sums = Annotated[bytes, Meta(max_length=8 * BLOCKS_MAX)]
Range = tuple[Annotated[int, Meta(ge=0, le=4095)], Annotated[int, Meta(ge=0, le=4095)]]
Text = Annotated[str, Meta(max_length=4096)]
KeyList = Annotated[
    list[tuple[Annotated[int, Meta(ge=0, le=TOKENS_MAX)], Annotated[bytes, Meta(min_length=16, max_length=16)]]],
    Meta(max_length=KEYS_MAX),
]


def _require_whole(**packed: tuple[bytes, int]) -> None:
    for name, (data, width) in packed.items():
        if len(data) % width:
            raise ValueError(f"{name}: {len(data)} bytes are no multiple of {width}")


class Message(Struct, frozen=True, array_like=True):
    """Later fields go last and have defaults, so that an older reader ignores and an older writer omits them."""


class Request(Message, frozen=True):
    request_id: Id


class Reply(Message, frozen=True):
    request_id: Id


# Requests


class Hello(Request, frozen=True, tag=1):
    """Open a session, or say that an old one (`session` != 0, of `epoch`) goes on."""

    version_min: Count
    version_max: Count
    session: Id = 0
    epoch: Id = 0


class Attach(Request, frozen=True, tag=2):
    """`group`: of ranks, or nothing; `layers`, `heads`: the half-open ranges that this rank has."""

    session: Id
    spec: Annotated[bytes, Meta(max_length=SPEC_NBYTES_MAX)]
    group: Text = ""
    layers: Range = (0, 0)
    heads: Range = (0, 0)


class Find(Request, frozen=True, tag=3):
    """Query: how many leading tokens are cached. `keys`: (start token, 16-byte digest of the block's keys)."""

    session: Id
    spec_id: SpecId
    hashes: Hashes
    tokens: Tokens
    keys: KeyList = []

    def __post_init__(self) -> None:
        _require_whole(hashes=(self.hashes, 16), tokens=(self.tokens, 4))


class Acquire(Request, frozen=True, tag=4):
    """`shared`: other processes are to read on under this lease."""

    session: Id
    spec_id: SpecId
    lease: Id
    hashes: Hashes
    tokens: Tokens
    keys: KeyList = []
    shared: bool = False

    def __post_init__(self) -> None:
        _require_whole(hashes=(self.hashes, 16), tokens=(self.tokens, 4))


class Reserve(Request, frozen=True, tag=5):
    """Room for the blocks of `hashes` that are not there yet, from token `start` on.

    `tail`: symbols of a short last block. `member`: of a rank, which always asks for the whole chain.
    """

    session: Id
    spec_id: SpecId
    reservation: Id
    hashes: Hashes
    start: Count
    tail: Annotated[bytes, Meta(max_length=4096)] = b""
    member: Id = 0

    def __post_init__(self) -> None:
        _require_whole(hashes=(self.hashes, 16))


class Commit(Request, frozen=True, tag=6):
    """Seal a reservation. `summed`: one byte per block, 1 where the writer made a checksum: left in the header, or, by
    a rank, sent in `sums`, u64 little-endian each. `keep`: the writer still has views of the slots, so the reservation
    becomes a lease of the same id."""

    session: Id
    reservation: Id
    summed: Flags
    keep: bool = False
    priority: Annotated[int, Meta(ge=-1, le=1)] = 0
    keep_for_s: Annotated[float, Meta(ge=0, le=SECONDS_MAX)] | None = None
    output_tokens: Count | None = None
    sums: Sums = b""

    def __post_init__(self) -> None:
        _require_whole(sums=(self.sums, 8))


class Clear(Request, frozen=True, tag=7):
    session: Id
    spec_id: SpecId


class GetStatus(Request, frozen=True, tag=8):
    pass


class Wait(Request, frozen=True, tag=9):
    """How far a lease's blocks have come: at once if `blocks` of them are ready, else when they are.

    `share`: instead of `lease`, of somebody else's.
    """

    session: Id
    lease: Id
    blocks: Count
    wait_ms: Annotated[float, Meta(ge=0, le=MS_MAX)]
    share: Id = 0


class Carry(Request, frozen=True, tag=10):
    """What a session of an earlier daemon still holds: (lease or reservation id, slots)."""

    session: Id
    holds: Annotated[list[tuple[Id, Slots]], Meta(max_length=LEASES_PER_NOTICE_MAX)]

    def __post_init__(self) -> None:
        for _, slots in self.holds:
            _require_whole(holds=(slots, 4))


# Notices


class Release(Message, frozen=True, tag=20):
    session: Id
    leases: Annotated[list[Id], Meta(max_length=LEASES_PER_NOTICE_MAX)]


class Abort(Message, frozen=True, tag=21):
    session: Id
    reservation: Id


class Discard(Message, frozen=True, tag=22):
    """A reader found that block number `block` under its lease is not what its name says. `share`: as in Wait."""

    session: Id
    lease: Id
    block: Count
    reason: Text
    share: Id = 0


class Prefetch(Message, frozen=True, tag=23):
    """A prompt that comes soon. Fields as in Acquire."""

    session: Id
    spec_id: SpecId
    hashes: Hashes
    tokens: Tokens
    keys: KeyList = []

    def __post_init__(self) -> None:
        _require_whole(hashes=(self.hashes, 16), tokens=(self.tokens, 4))


class Report(Message, frozen=True, tag=24):
    """What the engine measured: feeds load-or-recompute and metrics."""

    session: Id
    spec_id: SpecId
    prefill_tokens: Count | None = None
    prefill_ms: Annotated[float, Meta(ge=0, le=MS_MAX)] | None = None
    ttft_ms: Annotated[float, Meta(ge=0, le=MS_MAX)] | None = None


class Goodbye(Message, frozen=True, tag=25):
    session: Id


# Replies


class Welcome(Reply, frozen=True, tag=40):
    version: Count
    epoch: Id
    session: Id
    slab_path: Text
    sessions_path: Text
    checksums: bool
    verify: bool = False  # whether readers sum payloads, too


class Attached(Reply, frozen=True, tag=41):
    """`member`: the rank's place in its group; 0 without one."""

    spec_id: SpecId
    hash_kind: Text
    member: Id = 0


class Found(Reply, frozen=True, tag=42):
    num_tokens: Count


class Acquired(Reply, frozen=True, tag=43):
    """`slots`: one per block, the last one shared in part where num_tokens says so. `ready`: blocks readable now.

    `share`: the number under which others may read; 0 on a miss, and where that was not asked for.
    """

    num_tokens: Count
    slots: Slots
    ready: Count
    share: Id = 0

    def __post_init__(self) -> None:
        _require_whole(slots=(self.slots, 4))


class Reserved(Reply, frozen=True, tag=44):
    """`start`: first token to store. No slots and available < wanted: ask again for `available` blocks."""

    start: Count
    slots: Slots
    generation: Id
    available: Count

    def __post_init__(self) -> None:
        _require_whole(slots=(self.slots, 4))


class Committed(Reply, frozen=True, tag=45):
    num_blocks: Count


class Done(Reply, frozen=True, tag=46):
    pass


class State(Reply, frozen=True, tag=47):
    """`json`: the daemon's status as a JSON object."""

    json: Annotated[bytes, Meta(max_length=MESSAGE_NBYTES_MAX)]


class Failed(Reply, frozen=True, tag=48):
    """`code` is from a closed set: see kvstore.errors."""

    code: Text
    text: Text


class Loaded(Reply, frozen=True, tag=49):
    """`ready`: leading blocks of the lease that are readable; `final`: there will be no more of them."""

    ready: Count
    final: bool


AnyRequest = Hello | Attach | Find | Acquire | Wait | Reserve | Commit | Clear | GetStatus | Carry
AnyNotice = Release | Abort | Discard | Prefetch | Report | Goodbye
AnyReply = Welcome | Attached | Found | Acquired | Loaded | Reserved | Committed | Done | State | Failed
AnyMessage = AnyRequest | AnyNotice | AnyReply


def _digest(body: bytes | memoryview) -> bytes:
    return xxhash.xxh3_64_intdigest(body).to_bytes(DIGEST_NBYTES, "little")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """One frame. LocalProtocolError when it would exceed MESSAGE_NBYTES_MAX."""
    body = _encoder.encode(message)
    if len(body) + DIGEST_NBYTES > MESSAGE_NBYTES_MAX:
        raise LocalProtocolError(f"{type(message).__name__} of {len(body)} bytes is above {MESSAGE_NBYTES_MAX}")
    return sealed(body)


def sealed(body: bytes) -> bytes:
    """Query. A body with its digest behind it."""
    return body + _digest(body)


def unsealed(frame: bytes | memoryview) -> memoryview:
    """Query. What `sealed` was given. RemoteProtocolError: something flipped on the way."""
    view = memoryview(frame)
    body, digest = view[:-DIGEST_NBYTES], bytes(view[-DIGEST_NBYTES:])
    if digest != _digest(body):
        raise RemoteProtocolError(f"bad {len(frame)}-byte frame: it is not what was sent")
    return body


def decode(frame: bytes | memoryview) -> AnyMessage:
    """Any bytes at all become a message or RemoteProtocolError."""
    body = unsealed(frame)
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as exc:  # msgspec recurses on nesting in unknown fields
        raise RemoteProtocolError(f"bad {len(frame)}-byte frame: {exc}") from exc
