"""What the core counts, where the event completes. Shells read; nothing here is ever reset."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Guard(StrEnum):
    """What stands between a fault and a wrong answer. Each is counted when it has held something back."""

    CHECKSUM = "checksum"  # bytes that are not what was written
    TOKENS = "tokens"  # a block of this name that is not the one asked for
    SEAL = "seal"  # reserved blocks that never got a name, because they were never whole
    PIN = "pin"  # room that was refused, because what lies there is in use
    ROW = "row"  # slots that were free only once their row was deleted
    BYTES = "bytes"  # rows that were not written, because their bytes were not
    SESSION = "session"  # leases and reservations of the dead
    RESTART = "restart"  # slots not reused before the clients of the daemon before had said what they hold
    GENERATION = "generation"  # commands for a session or reservation of an earlier life
    DEADLINE = "deadline"  # answers given because it was time, or because whoever made the answer failed


@dataclass(slots=True)
class Stats:
    """Laws: lookups = hits + misses; committed + aborted + open = reservations."""

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    tokens_asked: int = 0
    tokens_hit: int = 0
    blocks_hit: int = 0
    shares_refused: int = 0  # leases that other processes cannot read under, because too many can
    hits_shortened: int = 0  # by session_share
    reservations: int = 0
    reservations_committed: int = 0
    reservations_aborted: int = 0
    reservations_refused: int = 0
    reservations_unfilled: int = 0  # of those aborted: a rank's part never came
    parts_already: int = 0  # ranks told that another one fills their part: MLA, replicated heads
    blocks_stored: int = 0
    blocks_already: int = 0  # written twice by writers that did not know of each other
    bytes_stored: int = 0
    blocks_summed: int = 0
    blocks_loaded: int = 0  # from the lower tier into memory, verified
    bytes_loaded: int = 0
    loads_shortened: int = 0  # for want of room in memory
    loads_refused: int = 0  # recomputing was faster
    loads_probed: int = 0
    loads_cut: int = 0  # given up in the midst, because recomputing had become faster
    tokens_loaded: int = 0  # of hits, from the lower tier
    blocks_written: int = 0  # into the lower tier, durable
    bytes_written: int = 0
    groups_failed: int = 0
    sessions_opened: int = 0
    sessions_closed: int = 0
    sessions_died: int = 0
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    ttft_reports: int = 0
    ttft_ms: float = 0.0
    guards: Counter[str] = field(default_factory=Counter)  # by Guard
    discards: Counter[str] = field(default_factory=Counter)  # by reason, from DISCARD_REASONS
    load_failures: Counter[str] = field(default_factory=Counter)  # blocks, by Outcome
    writes_dropped: Counter[str] = field(default_factory=Counter)  # blocks: full, budget, paused, io, payload
