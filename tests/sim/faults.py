"""What can go wrong, one function each, and how often everything happens. What took effect is counted by kind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.core.groups import PARTS_MS
from kvstore.core.layout import HEADER_NBYTES, TOKENS_OFFSET, Header
from kvstore.core.slots import SLOTS_PER_EXTENT_MAX
from kvstore.core.store import QUARANTINE_MS
from kvstore.core.tier import SEALED
from kvstore.media.slabfile import DATA_OFFSET
from tests.sim.process import Process
from tests.sim.world import Happenings, LateWrite, World

HOUR_MS = 3.6e6
POPULATION_MIN, POPULATION_MAX = 2, 5


# Processes


def process_dies(world: World) -> None:
    """SIGKILL, in the midst of whatever it was at. Its device may write on for a while."""
    process = _some(world, lambda each: not each.is_dead)
    if process is not None:
        _die(world, process)
        world.machine.faults["process killed"] += 1


def _die(world: World, process: Process) -> None:
    if not process.pid_visible:
        until_ms = min(process.ends_ms, world.now_ms + QUARANTINE_MS)
        world.late += [LateWrite(*filling.half, until_ms) for filling in process.fillings if filling.half]
    if world.rng.random() < 0.5:
        process.endpoint.outgoing.clear()
    process.die()


def process_dies_writing(world: World) -> None:
    """In the midst of filling a block: where only its lock tells, its device may write on for a while."""
    process = _some(world, lambda each: not each.is_dead and any(filling.half for filling in each.fillings))
    if process is not None:
        _die(world, process)
        world.machine.faults["process killed writing"] += 1


def process_is_born(world: World) -> None:
    """Others come."""
    if len([each for each in world.node.everybody if not each.is_dead]) < world.rng.randint(1, POPULATION_MAX):
        world.new_process()


def process_stalls(world: World) -> None:
    """SIGSTOP, also in the midst of a call."""
    process = _some(world, lambda each: not (each.is_dead or each.is_stalled))
    if process is not None:
        process.is_stalled = True
        world.machine.faults["process stalled"] += 1


def rank_stalls(world: World) -> None:
    """SIGSTOP, while the others of its engine wait for its part, or for its end."""
    process = _some(world, lambda each: not (each.is_dead or each.is_stalled) and each.rank and each.fillings)
    if process is not None:
        process.is_stalled = True
        world.machine.faults["rank stalled"] += 1


def process_wakes(world: World) -> None:
    """SIGCONT: it goes on as if nothing had been."""
    process = _some(world, lambda each: each.is_stalled and not each.is_dead)
    if process is not None:
        process.is_stalled = False
        world.machine.faults["process came back"] += 1


def lock_is_lost(world: World) -> None:
    """A process closes the wrong descriptor. One that the daemon cannot watch is taken for dead, and goes on a while;
    one that it watches keeps what it holds, but the next daemon knows nothing of it."""
    process = _some(world, lambda each: not (each.is_dead or each.is_given_up) and each.link is not None)
    if process is not None and world.rng.random() < 0.5:
        world.node.locks.lose(process)
        if process.pid_visible and world.is_known(process):
            process.is_watched_only = True
        else:
            process.give_up(world.now_ms)
        world.machine.faults["lock lost"] += 1


def write_lands(world: World) -> None:
    """A device writes for a process that is dead."""
    if world.late:
        world.land(world.rng.choice(world.late))


def _some(world: World, is_so: object) -> Process | None:
    assert callable(is_so)
    able = [each for each in world.node.everybody if is_so(each)]
    return world.rng.choice(able) if able else None


# Time


def an_hour_passes(world: World) -> None:
    """TTL: between any two steps."""
    world.advance(HOUR_MS)
    world.machine.faults["an hour at once"] += 1


def rank_dies_with_daemon(world: World) -> None:
    """Its device writes on to what it held, where only the other ranks can say that it is held."""
    process = _some(world, lambda each: not each.is_dead and each.rank and any(part.half for part in each.fillings))
    if process is not None and world.node.daemon is not None:
        _die(world, process)
        world.machine.faults["process killed writing"] += 1
        daemon_is_replaced(world)


def patience_ends(world: World) -> None:
    """A part that nobody is at has been waited for long enough."""
    world.advance(PARTS_MS)


def room_is_needed(world: World) -> None:
    """All that nobody holds goes, so that it is another block soon."""
    world.memory_is_needed(share=1)


# The daemon


def daemon_dies(world: World) -> None:
    """SIGKILL. Its memory stays, and what its drive had in flight is there or not."""
    if world.node.daemon is not None:
        world.note_guards()
        world.node.kill()
        world.machine.faults["daemon killed"] += 1


def daemon_starts(world: World) -> None:
    """Another one takes its place; clients find it by themselves."""
    if world.node.daemon is None:
        if world.rng.random() < 0.5:
            world.node.lose_memory()
            world.machine.faults["memory lost"] += 1
        world.node.start()
        world.machine.faults["daemon restarted"] += 1


def daemon_is_replaced(world: World) -> None:
    """An upgrade: one dies and the next is there before anybody asks again."""
    if world.node.daemon is not None:
        daemon_dies(world)
        world.node.start()
        world.machine.faults["daemon restarted"] += 1


def daemon_ends_well(world: World) -> None:
    """In the twin: all that waits is written, then memory is lost; all of it is found again on disk."""
    if world.node.daemon is None:
        return
    for process in world.node.everybody:
        process.die()
    world._come_to_rest()
    world.node.kill()
    world.node.lose_memory()
    world.node.start()
    for _ in range(200):
        if world.service.store.lower is not None:
            break
        world.movers_work()
        world.daemon_turns()
    for _ in range(3):
        world.new_process()
    world.seen["twin restarted"] += 1


def power_fails(world: World) -> None:
    """Everybody dies, memory is gone, and so is what was not synced, or half of it, or what was written first."""
    for process in world.node.everybody:
        process.die()
    world.late.clear()
    if world.node.daemon is not None:
        world.note_guards()
        world.node.kill()
    world.node.lose_memory()
    for folder in world.node.folders:
        folder.file.lose_power(world.rng)
    world.node.everybody.clear()
    world.node.endpoints.clear()
    world.node.start()
    for _ in range(POPULATION_MIN):
        world.new_process()
    world.machine.faults["power lost"] += 1
    world.machine.faults["memory lost"] += 1


def handler_raises(world: World) -> None:
    """A bug of ours: whoever asked is answered, and then the daemon ends."""
    if world.node.daemon is not None:
        world.node.daemon.raises_next = True


def reply_is_lost(world: World) -> None:
    """A peer that does not read loses a reply: its queue is full."""
    world.node.drops_replies = 1


# The disk


def disk_call_fails(world: World) -> None:
    """The n-th call of a kind from now on fails, or does half of what it should."""
    folder = world.rng.choice(world.node.folders)
    ((what, within, _),) = world.rng.choices(CALLS, [weight for _, _, weight in CALLS])
    folder.file.disaster.plan(what, world.rng.randint(1, within))


CALLS = (
    ("read fails", 4, 2),
    ("short read", 4, 2),
    ("write fails", 8, 2),
    ("short write", 8, 3),
    ("sync fails", 2, 4),
    ("commit fails", 3, 3),
    ("index full", 3, 4),
    ("disk full", 3, 2),
)  # what, within so many calls, how often


def index_is_damaged(world: World) -> None:
    """Found at the next start: it has to be made anew from the blocks."""
    world.rng.choice(world.node.folders).file.disaster.plan("index damaged", 1)


def path_goes(world: World) -> None:
    """A drive answers nothing but errors, until it is looked at again at the next start."""
    folder = world.rng.choice(world.node.folders)
    if world.rng.random() < 0.5:
        folder.file.is_dead = not folder.file.is_dead


def disk_bit_flips(world: World) -> None:
    """In a block that has a row, anywhere in its slot."""
    folder = world.rng.choice(world.node.folders)
    if not folder.rows.rows:
        return
    slot = world.rng.choice(sorted(folder.rows.rows))
    extent, index = divmod(slot, SLOTS_PER_EXTENT_MAX)
    number, size = folder.superblock.number, folder.superblock.extent_nbytes
    slot_nbytes = _class_on_disk(world, folder.superblock.num_paths, number, extent)
    if not slot_nbytes or (index + 1) * slot_nbytes > size:
        return
    offset = DATA_OFFSET + extent // folder.superblock.num_paths * size + index * slot_nbytes
    folder.file.flip(offset + world.rng.randrange(slot_nbytes), world.rng.randrange(8))
    world.machine.faults["bit flipped on disk"] += 1


def _class_on_disk(world: World, num_paths: int, number: int, extent: int) -> int:
    table = world.node.folders[number].file.read(4096 + 4 * (extent // num_paths), 4)
    return int.from_bytes(table, "little")


# Memory


def payload_bit_flips(world: World) -> None:
    """In a sealed slot that is summed and that nobody looks at: no reader, and no tier below, may be given it."""
    if world.node.config.memory.verify and world.node.daemon is not None and not world.service.store.strangers:
        store = world.service.store
        leases = [lease for session in store.sessions for lease in session.leases.values()] + store.shares.read_on
        looked_at = {slot for lease in leases for slot in np.frombuffer(lease.slots, np.uint32).tolist()}
        slot = _some_sealed(world, lambda slot, header: slot not in looked_at and header.rects)
        if slot is not None:
            _flip(world, slot, HEADER_NBYTES, HEADER_NBYTES + world.service.slab.header(slot).payload_nbytes)
            world.machine.faults["bit flipped in a payload"] += 1


def header_bit_flips(world: World) -> None:
    """In a sealed slot: a reader sees it, and so does whoever goes on with the slab."""
    if world.flips_headers and world.node.daemon is not None:
        slot = _some_sealed(world, lambda slot, header: True)
        if slot is not None:
            _flip(world, slot, 0, TOKENS_OFFSET + len(world.service.slab.header(slot).identity.tokens))
            assert world.service.slab.header(slot) is None, "a bit of a header flipped and nobody noticed"
            world.machine.faults["bit flipped in a header"] += 1


def _some_sealed(world: World, is_so: Callable[[int, Header], object]) -> int | None:
    slab = world.service.slab
    sealed = (slab.tables.slots["state"] == SEALED).nonzero()[0].tolist()
    heads = {slot: slab.header(slot) for slot in sealed}
    slots = [slot for slot, header in heads.items() if header is not None and is_so(slot, header)]
    return world.rng.choice(slots) if slots else None


def _flip(world: World, slot: int, first: int, end: int) -> None:
    slab = world.service.slab
    world.damaged.add(slab.header(slot).identity.block_hash)
    bit = world.rng.randrange(8 * first, 8 * end)
    offset = slab.offset(slot, world._class_of(slot)) + bit // 8
    slab.write(offset, bytes((slab.read(offset, 1)[0] ^ 1 << bit % 8,)))


HAPPENINGS = Happenings(
    normal={
        "process_acts": 400,
        "daemon_serves": 300,
        "daemon_turns": 100,
        "movers_work": 200,
        "time_passes": 40,
        "seconds_pass": 2,
    },
    twin={"daemon_ends_well": 2, "memory_is_needed": 4},
    faults={
        "process_dies": 1.5,
        "process_dies_writing": 11,
        "process_is_born": 12,
        "process_stalls": 1,
        "process_wakes": 4,
        "lock_is_lost": 1.5,
        "write_lands": 4,
        "an_hour_passes": 0.5,
        "daemon_dies": 0.3,
        "daemon_starts": 20,
        "daemon_is_replaced": 0.4,
        "power_fails": 0.5,
        "reply_is_lost": 1,
        "disk_call_fails": 11,
        "index_is_damaged": 0.5,
        "path_goes": 0.5,
        "disk_bit_flips": 1,
        "header_bit_flips": 1.5,
        "payload_bit_flips": 2,
        "handler_raises": 0.6,
    },
    ranks={"rank_stalls": 3, "rank_dies_with_daemon": 3, "patience_ends": 2, "room_is_needed": 4},
)
HAPPENINGS.by_name = {name: getattr(World, name, None) or globals()[name] for name in [*HAPPENINGS.names, "heal"]}
FAULT_KINDS = (
    *("process killed", "process killed writing", "process stalled", "process came back", "process forked"),
    *("lock lost", "late device write", "an hour at once", "reply lost"),
    *("daemon killed", "daemon restarted", "memory lost", "power lost"),
    *("unsynced write lost", "unsynced write torn", "unsynced writes reordered"),
    *("completions late", "completions out of order"),
    *(what for what, *_ in CALLS),
    *("index damaged", "path gone", "bit flipped on disk", "bit flipped in a header", "bit flipped in a payload"),
    *("handler raised", "rank stalled"),
)
OUTCOMES = (
    *("hits", "partial hits", "reserved", "nothing reserved", "committed", "not committed", "aborted", "cleared"),
    *("reconnected", "connect refused", "read after all", "twin restarted"),
    *("parts reserved", "parts committed", "parts already", "parts given up", "parts never came", "ranks refused"),
    *("blocks of several ranks", "tickets", "redeemed", "redeemed by a rank", "redeemed too late", "read on"),
)
