"""What the core counts, where the event completes. Shells read; nothing here is ever reset."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """Laws: lookups = hits + misses; committed + aborted + open = reservations."""

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    tokens_asked: int = 0
    tokens_hit: int = 0
    blocks_hit: int = 0
    hits_shortened: int = 0  # by session_share
    reservations: int = 0
    reservations_committed: int = 0
    reservations_aborted: int = 0
    reservations_refused: int = 0
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
    discards: Counter[str] = field(default_factory=Counter)  # by reason, from DISCARD_REASONS
    load_failures: Counter[str] = field(default_factory=Counter)  # blocks, by Outcome
    writes_dropped: Counter[str] = field(default_factory=Counter)  # blocks, by reason: full, budget, paused, io
