"""The SSD medium on real files: what is written is read again, on several paths, after crashes, cuts, shortages."""

import errno
import logging
import mmap
import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import xxhash

from kvstore.core.layout import HEADER_NBYTES, Header, Identity, Rect, Shard
from kvstore.core.slots import SLOTS_PER_EXTENT_MAX
from kvstore.errors import TierUnavailable
from kvstore.media.check import Fault, Report, verify
from kvstore.media.disk import BlockRow, Disk
from kvstore.media.slabfile import DATA_OFFSET
from radix import block_symbols_of
from tests.models import page_of
from tests.sources import ROOT

EXTENT = 1 << 20
CAPACITY = 8 * EXTENT
SLOT = 16384
SPEC = b"f" * 32


class Stored(NamedTuple):
    """A block of one slot, in page-aligned memory."""

    row: BlockRow
    data: memoryview


def slot_of(extent: int, index: int) -> int:
    return extent * SLOTS_PER_EXTENT_MAX + index


def block(slot: int, number: int, parent: bytes, name: bytes = b"", num_tokens: int = 8, generation: int = 1) -> Stored:
    """A block whose hash and payload follow from its name and place."""
    seed = xxhash.xxh3_128_digest(parent + name + number.to_bytes(4, "little"))
    payload = np.random.default_rng(list(seed)).bytes((SLOT - HEADER_NBYTES) // 8 * num_tokens)
    tokens = np.frombuffer(seed * 2, "<u4")[:num_tokens].tobytes()
    identity = Identity(SPEC, seed, parent, number, tokens, num_tokens, bytes(16), number, 8)
    rects = (Rect(Shard((0, 2), (0, 4)), xxhash.xxh3_64_intdigest(payload)),)
    buffer = mmap.mmap(-1, SLOT)
    buffer[: HEADER_NBYTES + len(payload)] = page_of(Header(identity, len(payload), generation, rects)) + payload
    symbols = block_symbols_of(tokens, num_tokens, bytes(16))
    return Stored(BlockRow(slot, seed, parent, number, num_tokens < 8, generation, symbols), memoryview(buffer))


def chain(slots: list[int], name: bytes = b"") -> list[Stored]:
    blocks: list[Stored] = []
    for number, slot in enumerate(slots):
        blocks.append(block(slot, number, blocks[-1].row.block_hash if blocks else b"r" * 16, name))
    return blocks


def store(disk: Disk, blocks: list[Stored]) -> None:
    for extent in {each.row.slot // SLOTS_PER_EXTENT_MAX for each in blocks}:
        disk.allocate_extent(extent)
        disk.set_class(extent, SLOT)
    for each in blocks:
        disk.write(each.row.slot, SLOT, each.data)
    disk.sync()
    disk.commit([each.row for each in blocks], ())


def read(disk: Disk, slot: int) -> bytes:
    with mmap.mmap(-1, SLOT) as buffer, memoryview(buffer) as view:
        disk.read(slot, SLOT, view)
        return view.tobytes()


def rows_of(disk: Disk) -> set[BlockRow]:
    return {
        BlockRow(
            *(int(row["slot"]), row["hash"].tobytes(), row["parent"].tobytes(), int(row["number"])),
            *(bool(row["short"]), int(row["last_used"]), disk.symbols(int(row["slot"]))),
        )
        for row in disk.rows()
    }


def same(disk: Disk, blocks: list[Stored]) -> None:
    """Assert that the disk holds these blocks and no other."""
    assert rows_of(disk) == {each.row for each in blocks}
    assert all(read(disk, each.row.slot) == each.data for each in blocks)


def checked(disk: Disk, fix: bool = False) -> Report:
    return verify(disk, lambda done, total: None, fix)


def open_disk(*paths: Path, capacity: int = CAPACITY, index_nbytes: int = 16 << 20) -> Disk:
    return Disk.open(paths, capacity, EXTENT, index_nbytes=index_nbytes)


def overwrite(path: Path, data: bytes, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run_child(script: str, *arguments: object) -> str:
    """What a Python script says that runs to its end in a process of its own."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60).stdout


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in "abc"]


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


# Reading and writing


def test_what_was_stored_is_there_after_a_reopen(place: Path) -> None:
    """RST: data, rows, symbols, slot sizes and facts; and nothing is left open."""
    blocks = chain([slot_of(2, index) for index in range(5)])
    before = num_descriptors()
    with closing(open_disk(place)) as disk:
        assert disk.is_direct, "the file system of the tests takes direct I/O"
        assert disk.geometry == (8, EXTENT)
        assert disk.geometry.capacity_nbytes == CAPACITY
        assert not disk.needs_rebuild
        store(disk, blocks)
        disk.commit((), (), {"written": 5 * SLOT})
        same(disk, blocks)
    with closing(open_disk(place)) as disk:
        same(disk, blocks)
        assert disk.facts() == {"written": 5 * SLOT}
        assert disk.classes().tolist() == [0, 0, SLOT, 0, 0, 0, 0, 0]
        report = checked(disk)
        assert report == (5, 5 * SLOT, 5, 0, 0, {})
    disk.close()
    assert num_descriptors() == before
    assert oct(place.stat().st_mode)[-3:] == "700"


def test_extents_are_striped_over_the_paths(places: list[Path]) -> None:
    """DSK."""
    with closing(open_disk(*places)) as disk:
        blocks = chain([slot_of(extent, 1) for extent in range(8)])
        store(disk, blocks)
        assert disk.usable_extents == list(range(8))
        assert [disk.path_of(slot_of(extent, 3)).name for extent in range(4)] == ["a", "b", "c", "a"]
    assert [(path / "slab").stat().st_size for path in places] == [DATA_OFFSET + n * EXTENT for n in (3, 3, 2)]
    for each in blocks:
        path, at = places[each.row.slot // SLOTS_PER_EXTENT_MAX % 3], each.row.slot // SLOTS_PER_EXTENT_MAX // 3
        with (path / "slab").open("rb") as file:
            file.seek(DATA_OFFSET + at * EXTENT + SLOT)
            assert file.read(SLOT) == each.data
    with closing(open_disk(*places)) as disk:
        same(disk, blocks)


def test_without_direct_io_the_page_cache_serves(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CFG: said once."""
    real_open = os.open

    def refuse(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    with closing(open_disk(place)) as disk:
        assert not disk.is_direct
        store(disk, chain([0, 1]))
        same(disk, chain([0, 1]))
    assert caplog.messages == [f"disk.path={place}: no direct I/O; blocks go through the page cache"]


def test_einval_is_our_bug_and_no_fault_of_the_device(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """COR: direct I/O that is not aligned must show, not count as a miss."""

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with closing(open_disk(place)) as disk:
        store(disk, chain([0]))
        monkeypatch.setattr(os, "preadv", refuse)
        with pytest.raises(AssertionError):
            read(disk, 0)


def test_symbols_are_read_beside_a_commit(place: Path) -> None:
    """PRF: one thread of each; the old row or the new one, whole."""
    blocks = [block(0, 0, b"p" * 16, bytes([name])) for name in range(40)]
    with closing(open_disk(place)) as disk:
        store(disk, blocks[:1])
        committer = threading.Thread(target=lambda: [disk.commit([each.row], [0]) for each in blocks])
        committer.start()
        seen = set()
        while committer.is_alive():
            seen.add(disk.symbols(0))
        committer.join()
        assert seen <= {each.row.symbols for each in blocks}
        assert disk.symbols(0) == blocks[-1].row.symbols


# Sizes


def test_it_grows(place: Path) -> None:
    """CFG: what is there stays where it is, and the extent size is the slab's own."""
    blocks = chain([slot_of(7, 0), slot_of(7, 1)])
    with closing(open_disk(place)) as disk:
        store(disk, blocks)
    with closing(Disk.open([place], 3 * CAPACITY + 5)) as disk:
        assert disk.geometry == (24, EXTENT)
        same(disk, blocks)
        store(disk, chain([slot_of(23, 63)], b"new"))
        assert len(disk.rows()) == 3


def test_it_shrinks_and_what_is_cut_off_never_comes_back(place: Path) -> None:
    """DSK, COR: not even when it grows again before the next commit."""
    blocks = chain([slot_of(extent, 0) for extent in range(8)])
    with closing(open_disk(place)) as disk:
        store(disk, blocks)
    with closing(open_disk(place, capacity=CAPACITY // 2)) as disk:
        same(disk, blocks[:4])
        assert (place / "slab").stat().st_size == DATA_OFFSET + CAPACITY // 2
    with closing(open_disk(place)) as disk:
        assert disk.classes().tolist() == [SLOT] * 4 + [0] * 4
        same(disk, blocks[:4])
        for extent in range(4, 8):
            disk.set_class(extent, SLOT)
        disk.commit([blocks[5].row], ())  # deletes the others that stand for nothing, and not this one
        assert {row.slot for row in rows_of(disk)} == {slot_of(extent, 0) for extent in (0, 1, 2, 3, 5)}


@pytest.mark.parametrize("capacity", [EXTENT - 1, 1 << 60])
def test_a_capacity_that_cannot_be_is_refused(place: Path, capacity: int) -> None:
    """CFG."""
    before = num_descriptors()
    with pytest.raises(TierUnavailable, match=f"disk.capacity={capacity}: too small or too large"):
        open_disk(place, capacity=capacity)
    assert num_descriptors() == before
    assert not (place / "slab").exists()


def test_a_cut_slab_is_mended_and_lost_extents_are_empty(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """RST, COR."""
    blocks = chain([slot_of(extent, 0) for extent in range(8)])
    with closing(open_disk(place)) as disk:
        store(disk, blocks)
    os.truncate(place / "slab", DATA_OFFSET + 2 * EXTENT + 8192)
    with closing(open_disk(place)) as disk:
        same(disk, blocks[:2])
        assert disk.classes().tolist() == [SLOT] * 2 + [0] * 6
        store(disk, chain([slot_of(7, 5)], b"new"))
    assert caplog.messages == [f"disk.path={place}: the slab was cut; extents=6 are lost"]
    with closing(open_disk(place)) as disk:
        assert len(disk.rows()) == 3
    assert len(caplog.messages) == 1


# What is not ours to use


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b"the operator's notes"), "is not a slab of ours"),
        (lambda path: path.write_bytes(b""), "is not a slab of ours"),
        (lambda path: os.truncate(path, 30), "has a damaged superblock"),
        (lambda path: overwrite(path, b"\1", 8), "has format version 1, not 2"),
        (lambda path: overwrite(path, b"\xff", 40), "has a damaged superblock"),
    ],
    ids=["foreign", "empty", "short", "version", "sum"],
)
def test_a_file_that_is_not_our_slab_is_left_as_it_is(
    place: Path, damage: Callable[[Path], object], reason: str
) -> None:
    """COR, CFG."""
    open_disk(place).close()
    damage(place / "slab")
    before, content = num_descriptors(), (place / "slab").read_bytes()
    with pytest.raises(TierUnavailable, match=f"^disk.path={place}: the file `slab` {reason}; it is left as it is$"):
        open_disk(place)
    assert (place / "slab").read_bytes() == content
    assert num_descriptors() == before


def test_paths_in_another_order_are_refused(places: list[Path]) -> None:
    """CFG: the line says which is which."""
    open_disk(*places[:2]).close()
    before = num_descriptors()
    for wrong in (places[1::-1], places[:1], places):
        with pytest.raises(TierUnavailable, match=r"no set, or not in its order: .*is path 1 of 2 of set [0-9a-f]{8}"):
            open_disk(*wrong)
    open_disk(places[2]).close()
    with pytest.raises(TierUnavailable, match=r"c is path 1 of 1 of set .*; .*b is path 2 of 2 of set"):
        open_disk(places[2], places[1])
    assert num_descriptors() == before
    open_disk(*places[:2]).close()


def test_one_daemon_at_a_time(places: list[Path]) -> None:
    """CFG."""
    with closing(open_disk(*places[:2])):
        before = num_descriptors()
        with pytest.raises(TierUnavailable, match=f"disk.path={places[1]}: in use by another daemon, or named twice"):
            open_disk(places[2], places[1])
        assert num_descriptors() == before
    with pytest.raises(TierUnavailable, match="named twice"):
        open_disk(places[0], places[0])


def test_a_folder_of_others_is_refused_untouched(place: Path) -> None:
    """SEC."""
    place.mkdir()
    (place / "theirs").touch()
    place.chmod(0o750)
    with pytest.raises(TierUnavailable, match=f"disk.path={place}: must belong to this user with mode 0700"):
        open_disk(place)
    assert [path.name for path in place.iterdir()] == ["theirs"]


def test_an_empty_folder_of_ours_becomes_private(place: Path) -> None:
    """SEC: `mkdir DIR` and `--disk.path DIR` is what anybody types."""
    place.mkdir()
    place.chmod(0o755)
    open_disk(place).close()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


# Devices that fail


def test_a_path_that_cannot_be_made_is_left_out(places: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    """DSK: and joins again when it can."""
    places[1].write_text("a file")
    below = places[1] / "below"
    with pytest.raises(TierUnavailable, match=r"Not a directory \(ENOTDIR\)"):
        open_disk(below)
    assert not caplog.messages
    blocks = chain([slot_of(extent, 0) for extent in (0, 2, 3)])
    with closing(open_disk(places[0], below, places[2])) as disk:
        assert disk.usable_extents == [0, 2, 3, 5, 6]
        assert caplog.messages == [f"disk.path={below}: Not a directory (ENOTDIR); going on without it"]
        store(disk, blocks)
        for call in (disk.allocate_extent, lambda extent: disk.set_class(extent, SLOT)):
            with pytest.raises(TierUnavailable, match="out of use"):
                call(4)
        assert disk.symbols(slot_of(4, 0)) == b""
    places[1].unlink()
    with closing(open_disk(places[0], below, places[2])) as disk:
        assert len(disk.usable_extents) == 8
        same(disk, blocks)


def test_a_dead_path_is_taken_out(places: list[Path]) -> None:
    """DSK: the others go on; rows for it are passed over."""
    blocks = chain([slot_of(extent, 0) for extent in range(8)])
    before = num_descriptors()
    with closing(open_disk(*places)) as disk:
        store(disk, blocks)
        assert disk.fail_path(slot_of(4, 9)) == [1, 4, 7]
        assert disk.fail_path(slot_of(1, 0)) == []
        assert disk.usable_extents == [0, 2, 3, 5, 6]
        same(disk, [blocks[extent] for extent in (0, 2, 3, 5, 6)])
        with pytest.raises(TierUnavailable, match=f"disk.path={places[1]}: out of use"):
            read(disk, slot_of(1, 0))
        disk.sync()
        disk.commit([blocks[1].row], [slot_of(0, 0), slot_of(4, 0)])
        assert len(disk.rows()) == 4
    assert num_descriptors() == before


@pytest.mark.parametrize(
    ("call", "act"),
    [
        ("preadv", lambda disk, each: read(disk, 0)),
        ("pwritev", lambda disk, each: disk.write(0, SLOT, each.data)),
        ("fdatasync", lambda disk, each: (disk.write(0, SLOT, each.data), disk.sync())),
        ("posix_fallocate", lambda disk, each: disk.allocate_extent(1)),
        ("pwrite", lambda disk, each: disk.set_class(1, SLOT)),
    ],
)
def test_an_io_error_is_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, call: str, act: Callable[[Disk, Stored], object]
) -> None:
    """DSK."""

    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    (each,) = chain([0])
    with closing(open_disk(place)) as disk:
        store(disk, [each])
        monkeypatch.setattr(os, call, fail)
        with pytest.raises(TierUnavailable, match=rf"^disk\.path={place}: Input/output error \(EIO\)$"):
            act(disk, each)
        monkeypatch.undo()
        if call == "fdatasync":  # the next one would succeed, though the data may be lost
            with pytest.raises(TierUnavailable):
                disk.sync()


def test_short_transfers_are_errors(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """COR: class report L#4991."""
    (each,) = chain([slot_of(7, 0)])
    with closing(open_disk(place)) as disk:
        store(disk, [each])
        monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: 4096)
        with pytest.raises(TierUnavailable, match="short write: 4096 of 16384 bytes"):
            disk.write(slot_of(7, 0), SLOT, each.data)
        os.truncate(place / "slab", DATA_OFFSET + 7 * EXTENT + 8192)
        with pytest.raises(TierUnavailable, match="short read: 8192 of 16384 bytes"):
            read(disk, slot_of(7, 0))


def test_a_full_file_system_is_an_error(small_tmpfs: Path) -> None:
    """DSK: where space is taken, and not later."""
    with closing(open_disk(small_tmpfs)) as disk:
        disk.allocate_extent(0)
        with pytest.raises(TierUnavailable, match=r"No space left on device \(ENOSPC\)"):
            for extent in range(1, 8):
                disk.allocate_extent(extent)
        store(disk, chain([0, 1]))
        same(disk, chain([0, 1]))
        assert checked(disk).num_good == 2


FILE_SIZE_LIMIT = """
import resource, sys
from tests.test_disk import *
place, limit = Path(sys.argv[1]), DATA_OFFSET + 2 * EXTENT + 8192
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    open_disk(place)
except TierUnavailable as exc:
    print(exc)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with closing(open_disk(place)) as disk:
    store(disk, chain([0]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for extent in (2, 3):
        try:
            store(disk, chain([slot_of(extent, 0)]))
        except TierUnavailable as exc:
            print(exc)
    same(disk, chain([0]))
"""


def test_a_limit_on_file_size_is_an_error_and_no_signal(place: Path) -> None:
    """COR, DSK: class report L#4991."""
    lines = run_child(FILE_SIZE_LIMIT, place).splitlines()
    assert [line.removeprefix(f"disk.path={place}: ") for line in lines] == [
        "File too large (EFBIG)",
        "short write: 8192 of 16384 bytes (EIO)",
        "File too large (EFBIG)",
    ]
    with closing(open_disk(place)) as disk:
        same(disk, chain([0]))


def test_a_full_index_is_an_error_and_changes_nothing(place: Path) -> None:
    """DSK."""
    blocks = chain([slot_of(0, index) for index in range(60)])
    with closing(open_disk(place, index_nbytes=128 << 10)) as disk:
        store(disk, blocks[:2])
        many = [each.row._replace(symbols=bytes(2000)) for each in blocks]
        with pytest.raises(TierUnavailable, match=r"the index is full.*\(ENOSPC\)"):
            disk.commit(many, ())
        same(disk, blocks[:2])
        disk.commit((), [0])
        same(disk, blocks[1:2])


# Lost indexes


def rebuilt(disk: Disk) -> list[tuple[int, int]]:
    """Rebuild, and what was said meanwhile."""
    said: list[tuple[int, int]] = []
    disk.rebuild(lambda done, total: said.append((done, total)))
    assert not disk.needs_rebuild
    return said


@pytest.mark.parametrize("is_garbage", [True, False])
def test_a_lost_index_is_rebuilt(places: list[Path], caplog: pytest.LogCaptureFixture, is_garbage: bool) -> None:
    """RST: equal to before; the other paths' indexes are left alone."""
    caplog.set_level(logging.INFO, "kvstore")
    blocks = chain([slot_of(extent, index) for index in range(10) for extent in range(8)])
    last = block(slot_of(3, 20), 80, blocks[-1].row.block_hash, num_tokens=5)
    with closing(open_disk(*places)) as disk:
        store(disk, [*blocks, last])
    data = places[0] / "index" / "data.mdb"
    if is_garbage:
        data.write_bytes(random.Random(1).randbytes(data.stat().st_size))
    else:
        subprocess.run(["rm", "-r", str(data.parent)], check=True)
    with closing(open_disk(*places)) as disk:
        assert disk.needs_rebuild
        assert len(disk.rows()) == 50
        assert rebuilt(disk) == [(1, 3), (2, 3), (3, 3)]
        same(disk, [*blocks, last])
        assert checked(disk).num_good == 81
    assert caplog.messages[-1] == "ssd: index rebuilt extents=3 blocks=31"
    assert (places[0] / "index.aside-1").exists() == is_garbage
    with closing(open_disk(*places)) as disk:
        assert not disk.needs_rebuild
        same(disk, [*blocks, last])


def damage_rows(place: Path, each: Stored, data: bytes, at: int) -> None:
    """Changes state. Overwrite a part of the index's pages that hold this block's row."""
    index = place / "index" / "data.mdb"
    content = index.read_bytes()
    for page in range(0, len(content), 4096):
        if each.row.block_hash in content[page : page + 4096]:
            overwrite(index, data, page + at)


def test_damage_that_only_a_replay_finds_is_healed_too(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """RST, COR."""
    blocks = chain([slot_of(extent, index) for extent in range(8) for index in range(40)])
    with closing(open_disk(place)) as disk:
        store(disk, blocks)
    damage_rows(place, blocks[0], bytes(2), at=10)  # LMDB sees that it is no leaf, and says so at the first one
    with closing(open_disk(place)) as disk:
        assert not disk.needs_rebuild
        assert len(disk.rows()) == 0
        assert disk.needs_rebuild
        rebuilt(disk)
        same(disk, blocks)
    assert [message.split(":")[0] for message in caplog.messages] == [f"{place / 'index'} is damaged"]


REPLAY = """
import sys
from tests.test_disk import *
disk = open_disk(Path(sys.argv[1]))
assert not disk.needs_rebuild
disk.rows()
"""


def test_an_index_that_kills_its_reader_does_so_once(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """RST: LMDB aborts on some damage; a daemon that is started again must not die again."""
    blocks = chain([slot_of(extent, index) for extent in range(8) for index in range(40)])
    with closing(open_disk(place)) as disk:
        store(disk, blocks)
    run_child(REPLAY, place)
    damage_rows(place, blocks[200], bytes(4096), at=0)
    with pytest.raises(subprocess.CalledProcessError, match="SIGABRT"):
        run_child(REPLAY, place)
    assert not caplog.messages
    with closing(open_disk(place)) as disk:
        assert disk.needs_rebuild
        rebuilt(disk)
        same(disk, blocks)
    assert ["who read it died" in message for message in caplog.messages] == [True]
    with closing(open_disk(place)) as disk:
        assert not disk.needs_rebuild
        same(disk, blocks)


def test_a_rebuild_takes_only_what_may_have_been_written(place: Path) -> None:
    """COR: no damaged header, none that does not fit, of one block the newest."""
    blocks = chain([slot_of(0, index) for index in range(4)])
    twin = block(slot_of(0, 9), 1, blocks[0].row.block_hash, generation=2)
    assert twin.row.block_hash == blocks[1].row.block_hash
    with closing(open_disk(place)) as disk:
        store(disk, [*blocks, twin])
    overwrite(place / "slab", b"\xff", DATA_OFFSET + 3 * SLOT + 50)
    identity = Identity(SPEC, b"x" * 16, b"x" * 16, 0, b"1234", 1, bytes(16), 0, 1)
    overwrite(place / "slab", page_of(Header(identity, SLOT, 1, ())), DATA_OFFSET + 4 * SLOT)
    subprocess.run(["rm", "-r", str(place / "index")], check=True)
    with closing(open_disk(place)) as disk:
        rebuilt(disk)
        same(disk, [blocks[0], twin, blocks[2]])


# Check


@pytest.fixture
def family(place: Path) -> Iterator[tuple[Disk, list[Stored], list[Stored]]]:
    """Two chains of four: the first is for damage, the second stays whole."""
    one, other = (
        chain([slot_of(0, index) for index in range(4)]),
        chain([slot_of(1, index) for index in range(4)], b"o"),
    )
    with closing(open_disk(place)) as disk:
        store(disk, one + other)
        yield disk, one, other


def flip(place: Path, slot_index: int, at: int) -> None:
    with (place / "slab").open("r+b") as file:
        file.seek(DATA_OFFSET + slot_index * SLOT + at)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(("at", "fault"), [(HEADER_NBYTES + 777, Fault.SUM), (120, Fault.HEADER)])
def test_check_finds_a_flipped_bit(
    place: Path, family: tuple[Disk, list[Stored], list[Stored]], at: int, fault: Fault
) -> None:
    """COR: with fix, it and what is below it go, and nothing else."""
    disk, one, other = family
    assert checked(disk).bad == {}
    flip(place, 1, at)
    assert checked(disk) == (8, 8 * SLOT, 7, 2, 0, {fault: 1})
    assert len(disk.rows()) == 8
    assert checked(disk, fix=True).num_removed == 3
    same(disk, one[:1] + other)
    assert checked(disk, fix=True) == (5, 5 * SLOT, 5, 0, 0, {})


def test_check_finds_a_missing_parent(family: tuple[Disk, list[Stored], list[Stored]]) -> None:
    """RST."""
    disk, one, other = family
    disk.commit((), [one[1].row.slot])
    assert checked(disk, fix=True) == (7, 7 * SLOT, 6, 1, 2, {Fault.ORPHAN: 1})
    same(disk, one[:1] + other)


def test_check_finds_rows_that_say_something_else(family: tuple[Disk, list[Stored], list[Stored]]) -> None:
    """COR, IDN."""
    disk, one, other = family
    wrong = {
        "block_hash": b"w" * 16,
        "parent": b"w" * 16,
        "number": 9,
        "symbols": b"",
    }
    for each, (name, value) in zip(one, wrong.items(), strict=True):
        disk.commit([each.row._replace(**{name: value})], ())
    assert checked(disk, fix=True).bad == {Fault.IDENTITY: 4}
    same(disk, other)


def test_check_finds_twins_and_what_has_no_sum(family: tuple[Disk, list[Stored], list[Stored]]) -> None:
    """COR."""
    disk, one, other = family
    twin = block(slot_of(0, 9), 1, one[0].row.block_hash, generation=2)
    unsummed = block(slot_of(0, 10), 4, one[3].row.block_hash)
    unsummed.data[:HEADER_NBYTES] = page_of(
        Header(
            Identity(SPEC, *unsummed.row[1:4], bytes(unsummed.data[112:144]), 8, bytes(16), 4, 8),
            SLOT - HEADER_NBYTES,
            1,
            (),
        )
    )
    store(disk, [twin, unsummed])
    report = checked(disk, fix=True)
    assert report.bad == {Fault.TWICE: 1, Fault.UNVERIFIABLE: 1}
    assert report.num_removed == 2
    same(disk, [one[0], twin, *one[2:], *other])


def test_check_goes_on_over_what_cannot_be_read(
    family: tuple[Disk, list[Stored], list[Stored]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DSK."""
    disk, _, _ = family
    real_preadv = os.preadv

    def bad_sector(fd: int, buffers: list[memoryview], at: int) -> int:
        if at == DATA_OFFSET + SLOT:
            raise OSError(errno.EIO, "Input/output error")
        return real_preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", bad_sector)
    assert checked(disk) == (8, 8 * SLOT, 7, 2, 0, {Fault.UNREADABLE: 1})


# Crashes

WRITER = """
import sys
from tests.test_disk import *
disk, seed = open_disk(*map(Path, sys.argv[2:])), int(sys.argv[1])
assert not disk.needs_rebuild
disk.rows()
for extent in range(8):
    disk.allocate_extent(extent)
    disk.set_class(extent, SLOT)
for round in range(10**6):
    slots = [slot_of((round + index) % 8, round % 2) for index in range(3)]
    print("-", *slots, flush=True)
    disk.commit((), slots)
    blocks = [block(slot, 0, b"p" * 16, b"%d %d %d" % (seed, round, slot)) for slot in slots]
    for each in blocks:
        disk.write(each.row.slot, SLOT, each.data)
    disk.sync()
    disk.commit([each.row for each in blocks], (), {"rounds": round})
    print("+", *slots, flush=True)
"""


def killed_writer(paths: list[Path], seed: int) -> tuple[set[int], set[int]]:
    """A writer's life: slots that it said are full, and those it was just about to change."""
    command = [sys.executable, "-c", WRITER, str(seed), *map(str, paths)]
    full: set[int] = set()
    unsure: set[int] = set()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        kill_at = random.Random(seed).randrange(2, 40)
        for number, line in enumerate(child.stdout):  # goes on to what it had said when it died
            sign, *slots = line.split()
            unsure = set(map(int, slots)) if sign == "-" else set()
            full = full - unsure if unsure else full | set(map(int, slots))
            if number == kill_at:
                child.kill()
    return full, unsure


def test_kill_at_any_moment_leaves_every_committed_block_and_no_wrong_one(places: list[Path]) -> None:
    """RST, COR."""
    paths = places[:2]
    for seed in range(5):
        full, unsure = killed_writer(paths, seed)
        assert full
        with closing(open_disk(*paths)) as disk:
            slots = set(disk.rows()["slot"].tolist())
            assert full <= slots <= full | unsure
            report = checked(disk)
            assert (report.num_good, report.bad) == (len(slots), {})
            disk.commit((), sorted(slots))
