"""The LMDB index of one path: rows in and out, what is set aside, and what a shortage or damage looks like."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvstore.media.index import ROW, ROWS_PER_CHUNK, BlockRow, Index, IndexDamaged, open_index

MAP_NBYTES = 64 << 20
SLAB = b"a slab's identity"


def row(slot: int, symbols: bytes = b"") -> BlockRow:
    return BlockRow(slot, bytes([slot % 256]) * 16, bytes(16), slot, bool(slot % 2), 1 << 40, symbols)


def all_rows(index: Index) -> np.ndarray:
    return np.concatenate([np.zeros(0, ROW), *index.rows()])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def index(folder: Path) -> Iterator[Index]:
    with closing(open_index(folder, MAP_NBYTES, SLAB, is_slab_empty=True)) as index:
        yield index


def test_a_row_is_read_back_as_it_was_put(index: Index) -> None:
    """RST: and its bytes are the format, which a change of version must go with."""
    index.commit([BlockRow(5, b"h" * 15 + b"\0", b"p" * 16, 7, True, 9, b"says")], (), {})
    expected = "05000000 07000000 0900000000000000" + (b"h" * 15 + b"\0").hex() + (b"p" * 16).hex() + "01" + "00" * 7
    assert all_rows(index).tobytes() == bytes.fromhex(expected)
    assert index.symbols(5) == b"says"
    assert index.symbols(6) == b""


def test_rows_come_in_chunks_and_in_order_of_slots(index: Index) -> None:
    """PRF: no chunk holds the interpreter for long."""
    slots = [0, 255, 256, 65536, 2**32 - 1, *range(1000, 1000 + ROWS_PER_CHUNK)]
    index.commit([row(slot) for slot in slots], (), {})
    chunks = list(index.rows())
    assert [len(chunk) for chunk in chunks] == [ROWS_PER_CHUNK, 5]
    assert np.concatenate(chunks)["slot"].tolist() == sorted(slots)


def test_deletes_come_before_puts(index: Index) -> None:
    """RST: a slot that is given to another block is in both."""
    index.commit([row(1, b"old"), row(2, b"x")], (), {})
    index.commit([row(1, b"new")], [1, 2, 3], {})
    assert all_rows(index)["slot"].tolist() == [1]
    assert (index.symbols(1), index.symbols(2)) == (b"new", b"")


def test_facts_are_set_by_name(index: Index) -> None:
    """OBS."""
    index.commit((), (), {"written": 2**63, "other": 1})
    index.commit((), (), {"other": 2})
    assert index.facts() == {"written": 2**63, "other": 2}


def test_it_opens_again_for_its_slab_only(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """IDN: rows of another slab would name other bytes. Of what is set aside, the newest is kept."""
    with closing(open_index(folder, MAP_NBYTES, SLAB, is_slab_empty=True)) as index:
        index.commit([row(1)], (), {})
    with closing(open_index(folder, MAP_NBYTES, SLAB, is_slab_empty=False)) as index:
        assert len(all_rows(index)) == 1
    assert not caplog.records
    for number, other in enumerate((b"other", b"third"), 1):
        with closing(open_index(folder, MAP_NBYTES, other, is_slab_empty=False)) as index:
            assert len(all_rows(index)) == 0
            assert index.slab == b""
            index.slab = other
        assert "belongs to another slab" in caplog.messages[-1]
        assert [path.name for path in folder.parent.glob("index.*")] == [f"index.aside-{number}"]


def test_one_that_was_not_finished_is_made_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """RST: a rebuild that was interrupted leaves rows, but no mark."""
    with closing(open_index(folder, MAP_NBYTES, SLAB, is_slab_empty=False)) as index:
        index.commit([row(1)], (), {})
    with closing(open_index(folder, MAP_NBYTES, SLAB, is_slab_empty=False)) as index:
        assert len(all_rows(index)) == 0
    reasons = "there is none", "it is unfinished"
    assert caplog.messages == [f"{folder} does not open: {why}; it will be rebuilt from the slab" for why in reasons]


def overwrite(path: Path, data: bytes, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: overwrite(path, os.urandom(path.stat().st_size), 0),
        lambda path: overwrite(path, bytes(8192), 0),
        lambda path: overwrite(path, os.urandom(path.stat().st_size - 8192), 8192),
        lambda path: os.truncate(path, path.stat().st_size // 8192 * 4096),  # LMDB alone: SIGBUS
        lambda path: os.truncate(path, 8192),
        lambda path: os.truncate(path, 100),
        lambda path: os.truncate(path, 0),
        lambda path: path.unlink(),
    ],
    ids=["garbage", "no superblock", "garbled pages", "half", "two pages", "100 bytes", "empty", "gone"],
)
def test_a_damaged_index_is_set_aside(
    folder: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """RST, COR."""
    with closing(open_index(folder, MAP_NBYTES, SLAB, is_slab_empty=True)) as index:
        index.commit([row(slot, b"x" * 100) for slot in range(5000)], (), {})
    damage(folder / "data.mdb")
    with closing(open_index(folder, MAP_NBYTES, SLAB, is_slab_empty=False)) as index:
        assert index.slab == b""
        assert len(all_rows(index)) == 0
        index.commit([row(1)], (), {})
    assert len(caplog.messages) == 1
    assert (folder.parent / "index.aside-1").is_dir()


def test_rows_of_another_size_are_neither_written_nor_read(folder: Path) -> None:
    """COR."""
    with closing(open_index(folder, MAP_NBYTES, SLAB, is_slab_empty=True)) as index, pytest.raises(AssertionError):
        index.commit([row(1)._replace(parent=bytes(15))], (), {})
    with lmdb.open(str(folder), max_dbs=4) as env, env.begin(write=True) as txn:
        txn.put(bytes(4), bytes(51), db=env.open_db(b"rows", txn, integerkey=True))
    index = open_index(folder, MAP_NBYTES, SLAB, is_slab_empty=False)
    with closing(index), pytest.raises(IndexDamaged, match="another size"):
        list(index.rows())


def test_a_full_map_is_enospc_and_changes_nothing(folder: Path) -> None:
    """DSK."""
    with closing(open_index(folder, 128 << 10, SLAB, is_slab_empty=True)) as index:
        index.commit([row(1)], (), {})
        with pytest.raises(OSError, match="the index is full"):
            index.commit([row(slot, b"x" * 2000) for slot in range(2, 100)], [1], {})
        assert all_rows(index)["slot"].tolist() == [1]
        index.commit((), [1], {})
        assert len(all_rows(index)) == 0
