"""What a session holds: leases on cached blocks, and reservations of blocks to come. Both end with it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvstore.spec import KVSpec
from radix import BlockHash, Pin

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

    `private`: slots that are in no chain, of its own blocks that lost a race; views of them may still be alive.
    """

    slot_nbytes: int
    entry: SpecEntry | None  # None: held since before a restart
    pins: tuple[Pin, ...]
    num_tokens: int
    slots: bytes
    private: array[int]
    loading: Loading | None = None

    @property
    def nbytes(self) -> int:
        return (len(self.slots) // 4 + len(self.private)) * self.slot_nbytes


@dataclass(slots=True)
class Reservation:
    """Slots being filled: blocks [start:] of the chain `hashes`. `parent` pins the chain they continue."""

    entry: SpecEntry
    hashes: bytes
    start: int
    slots: array[int]
    generation: int
    parent: Pin
    short: bool

    @property
    def nbytes(self) -> int:
        return len(self.slots) * self.entry.spec.slot_nbytes


@dataclass(slots=True)
class Session:
    """One process. `number` is its place in the sessions file; `id` is never used twice.

    `held_nbytes` counts a block once per lease on it: cheap, and never below the truth.
    """

    id: int
    number: int
    leases: dict[int, Lease] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
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

    def add_reservation(self, reservation_id: int, reservation: Reservation) -> None:
        """Changes state."""
        assert reservation_id not in self.reservations
        self.reservations[reservation_id] = reservation
        self.held_nbytes += reservation.nbytes

    def pop_reservation(self, reservation_id: int) -> Reservation | None:
        """Changes state. The reservation, no longer the session's; None when it has none of that id."""
        reservation = self.reservations.pop(reservation_id, None)
        self.held_nbytes -= reservation.nbytes if reservation else 0
        return reservation
