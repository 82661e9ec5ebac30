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
    sessions_opened: int = 0
    sessions_closed: int = 0
    sessions_died: int = 0
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    ttft_reports: int = 0
    ttft_ms: float = 0.0
    discards: Counter[str] = field(default_factory=Counter)  # by reason, from DISCARD_REASONS
