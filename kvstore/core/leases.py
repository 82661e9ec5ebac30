"""What a session holds: leases on cached blocks, and reservations of blocks to come. Both end with it."""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvstore.core.layout import Shard
from kvstore.errors import KVStoreError
from kvstore.spec import KVSpec
from radix import BlockHash, Pin

if TYPE_CHECKING:
    from kvstore.core.groups import Group

LEASES_MAX = 65536
RESERVATIONS_MAX = 4096


@dataclass(slots=True, frozen=True)
class SpecEntry:
    """A spec the store serves. `root` seeds its hash chain."""

    spec_id: int
    spec: KVSpec
    root: BlockHash
    hash_kind: str


@dataclass(slots=True)
class Loading:
    """Of a lease whose blocks are not all in memory yet: how the load goes, and whether to wait on."""

    entry: SpecEntry
    started_ms: float
    first: int  # blocks that were there from the start
    num_tokens: int  # to be loaded
    is_cut: bool = False


@dataclass(slots=True)
class Lease:
    """What a session may read: the blocks of a chain, or whatever it still held when its daemon was restarted.

    `private`: slots that are in no chain, of its own blocks that lost a race or are not sealed yet; views of them may
    still be alive. `share`: the number under which other processes may read on it; 0 where they may not.
    """

    slot_nbytes: int
    entry: SpecEntry | None  # None: held since before a restart
    pins: tuple[Pin, ...]
    num_tokens: int
    slots: bytes
    private: array[int]
    loading: Loading | None = None
    share: int = 0

    @property
    def nbytes(self) -> int:
        return (len(self.slots) // 4 + len(self.private)) * self.slot_nbytes


@dataclass(slots=True, eq=False)
class Reservation:
    """Slots being filled: blocks [start:] of the chain `hashes`. `parent` pins the chain they continue.

    `shards`: what writers fill; one that is all of it, or those of the ranks of a group that have come so far, which
    do not overlap. `is_over`: sealed, or given up; then each writer that has yet to let go holds the slots for itself.
    """

    entry: SpecEntry
    hashes: bytes
    start: int
    slots: array[int]
    generation: int
    parent: Pin
    short: bool
    shards: dict[Shard, Filled | None]
    group: Group | None  # None: of one writer alone
    asked: bytes  # hash of the chain that its ranks ask for, of which this may be but the front
    opener: int  # the session that began it
    num_filling: int = 1  # writers that have neither committed nor let go
    is_over: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.slots) * self.entry.spec.slot_nbytes

    @property
    def filled(self) -> list[tuple[Shard, Filled]] | None:
        """Query. What the writers have made of it, once they have filled whole blocks; None before that."""
        filled = [(shard, each) for shard, each in self.shards.items() if each is not None]
        area = sum(shard.area for shard, _ in filled)
        is_whole = area == self.entry.spec.num_layers * self.entry.spec.num_kv_heads
        return sorted(filled) if is_whole else None


class Filled(NamedTuple):
    """A writer's word on its part of the leading blocks: a sum each, None where it made none.

    `keeper`: the lease under which it still looks at the slots; None where it does not.
    """

    sums: Sequence[int | None]
    keeper: Keeper | None


class Keeper(NamedTuple):
    """A writer's lease on what it has written: whose, under which id, and itself, since an id may be used again."""

    session_id: int
    lease_id: int
    lease: Lease


@dataclass(slots=True)
class Part:
    """A writer's hold on a reservation."""

    reservation: Reservation
    shard: Shard

    @property
    def nbytes(self) -> int:
        return self.reservation.nbytes


@dataclass(slots=True)
class Session:
    """One process. `number` is its place in the sessions file; `id` is never used twice.

    `held_nbytes` counts a block once per lease on it: cheap, and never below the truth.
    """

    id: int
    number: int
    leases: dict[int, Lease] = field(default_factory=dict)
    reservations: dict[int, Part] = field(default_factory=dict)
    held_nbytes: int = 0

    @property
    def holds_anything(self) -> bool:
        """Query."""
        return bool(self.leases or self.reservations)

    def add_lease(self, lease_id: int, lease: Lease) -> None:
        """Changes state."""
        assert lease_id not in self.leases
        self.leases[lease_id] = lease
        self.held_nbytes += lease.nbytes

    def pop_lease(self, lease_id: int) -> Lease | None:
        """Changes state. The lease, no longer the session's; None when it has none of that id."""
        lease = self.leases.pop(lease_id, None)
        self.held_nbytes -= lease.nbytes if lease else 0
        return lease

    def add_part(self, reservation_id: int, part: Part) -> None:
        """Changes state."""
        assert reservation_id not in self.reservations
        self.reservations[reservation_id] = part
        self.held_nbytes += part.nbytes

    def pop_part(self, reservation_id: int) -> Part | None:
        """Changes state. Its part of a reservation, no longer the session's; None when it has none of that id."""
        part = self.reservations.pop(reservation_id, None)
        self.held_nbytes -= part.nbytes if part else 0
        return part


def require_unused(number: int, others: Container[int]) -> None:
    """Query. A lease and a reservation of one id would meet when a commit makes one of the other."""
    if number in others:
        raise KVStoreError(f"id {number} is in use in this session")
