"""The slab and its folder on a real tmpfs: sizes, shortages, who may have it, and what a start or an end leaves."""

import os
import stat
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.layout import HEADER_NBYTES, Header, Identity
from kvstore.core.slots import EXTENT_NBYTES_MAX, EXTENT_NBYTES_MIN
from kvstore.errors import TierUnavailable
from kvstore.media import folder as folder_module
from kvstore.media.folder import SlabFolder, all_folders, default_folder, require_memory
from kvstore.media.memory import HUGE_PAGE_NBYTES, Geometry, Slab
from kvstore.service.service import geometry_for
from tests.models import write_header

SMALL = Geometry(4, EXTENT_NBYTES_MIN)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder name on a tmpfs, taken away at the end."""
    path = Path(f"/dev/shm/kvstore-test-{uuid.uuid4().hex[:12]}")
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 12 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m,mode=0700", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def new_slab(place: Path, geometry: Geometry = SMALL, epoch: int = 7) -> Slab:
    place.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(place / "slab", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return Slab.create(fd, geometry, epoch)


# Slab


@pytest.mark.parametrize(
    ("capacity", "num_extents", "extent_nbytes"),
    [
        (4 << 20, 1, 4 << 20),
        ((8 << 20) - 1, 1, 4 << 20),
        (16 << 20, 4, 4 << 20),
        (100 << 20, 6, 16 << 20),
        (1 << 30, 16, 64 << 20),
        ((1 << 40) + 5, 1 << 14, 64 << 20),
    ],
)
def test_a_capacity_is_cut_into_whole_extents(capacity: int, num_extents: int, extent_nbytes: int) -> None:
    """CFG: never more than was allowed."""
    geometry = geometry_for(capacity)
    assert geometry == (num_extents, extent_nbytes)
    assert geometry.capacity_nbytes <= capacity
    assert EXTENT_NBYTES_MIN <= geometry.extent_nbytes <= EXTENT_NBYTES_MAX
    assert geometry.data_offset % HUGE_PAGE_NBYTES == 0
    assert geometry.file_nbytes == geometry.data_offset + geometry.capacity_nbytes


def test_what_one_mapping_writes_another_reads(place: Path) -> None:
    """COR: and a client's mapping costs it no descriptor for longer than the mapping lives."""
    with closing(new_slab(place)) as mine:
        before = len(os.listdir("/proc/self/fd"))
        theirs = Slab.open(place / "slab", epoch=7)
        assert theirs.geometry == SMALL
        mine.tables.extents[0] = 8192
        offset = theirs.offset(3, 8192)
        theirs.payload(offset, 4096)[...] = 9
        assert mine.read(offset + HEADER_NBYTES, 4096) == bytes([9]) * 4096
        assert theirs.tables.extents[0] == 8192
        theirs.close()
        del theirs
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_lent_buffer_keeps_the_mapping(place: Path) -> None:
    """RST: arrays stay readable after the slab is closed and its file is gone."""
    slab = new_slab(place)
    offset = slab.offset(0, 8192)
    slab.payload(offset, 4096)[...] = 5
    array = np.frombuffer(slab.payload_buffer(offset, 4096), np.uint8)
    slab.close()
    (place / "slab").unlink()
    del slab
    assert (array == 5).all()


@pytest.mark.parametrize("damage", ["epoch", "magic", "version", "short", "absent"])
def test_another_file_is_not_taken_for_the_slab(place: Path, damage: str) -> None:
    """RST."""
    new_slab(place).close()
    path = place / "slab"
    if damage == "short":
        os.truncate(path, 20)
    elif damage == "absent":
        path.unlink()
    elif damage != "epoch":
        with path.open("r+b") as file:
            file.seek(0 if damage == "magic" else 8)
            file.write(b"\xff")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierUnavailable, match="slab"):
        Slab.open(path, epoch=8 if damage == "epoch" else 7)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_header_is_read_back_and_a_damaged_one_is_none(place: Path) -> None:
    """COR."""
    with closing(new_slab(place)) as slab:
        slab.tables.extents[1] = 12288
        slot = 8192 + 2
        offset = slab.offset(slot, 12288)
        assert offset == SMALL.data_offset + SMALL.extent_nbytes + 2 * 12288
        identity = Identity(bytes(32), b"h" * 16, b"p" * 16, 5, b"\1\0\0\0\2\0\0\0", 2, bytes(16), 1, 2)
        write_header(slab, offset, Header(identity, 5000, 3, ()))
        header = slab.header(slot)
        assert header is not None
        assert (header.identity, header.payload_nbytes, header.generation) == (identity, 5000, 3)
        slab.write(offset + 50, b"\xff")
        assert slab.header(slot) is None


def test_a_full_tmpfs_is_an_error_and_no_sigbus(small_tmpfs: Path) -> None:
    """RST: pages are taken before any slot is handed out."""
    with closing(new_slab(small_tmpfs)) as slab:
        slab.allocate_extent(0)
        slab.allocate_extent(1)
        with pytest.raises(TierUnavailable, match=r"extent 2 of the slab: No space left on device \(ENOSPC\)"):
            slab.allocate_extent(2)


def test_a_slab_whose_tables_do_not_fit_is_refused(small_tmpfs: Path) -> None:
    """CFG."""
    with pytest.raises(TierUnavailable, match="No space left"):
        new_slab(small_tmpfs, geometry_for(8 << 30))


# Folder


def test_a_folder_is_private_and_goes_at_the_end(place: Path) -> None:
    """SEC, LEK."""
    folder = SlabFolder(place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    os.close(folder.new_slab(1))
    assert stat.S_IMODE(folder.slab_path(1).stat().st_mode) == 0o600
    folder.remove()
    assert not place.exists()


def test_a_folder_of_others_is_refused_untouched(place: Path) -> None:
    """SEC: nothing is left in it either."""
    place.mkdir()
    (place / "theirs").touch()
    place.chmod(0o750)
    with pytest.raises(TierUnavailable, match="must belong to this user with mode 0700"):
        SlabFolder(place)
    assert [path.name for path in place.iterdir()] == ["theirs"]
    if not os.geteuid():
        place.chmod(0o700)
        os.chown(place, 12345, 12345)
        with pytest.raises(TierUnavailable, match="must belong to this user with mode 0700"):
            SlabFolder(place)
        assert [path.name for path in place.iterdir()] == ["theirs"]


def test_a_folder_that_cannot_be_made_is_refused(place: Path) -> None:
    """CFG."""
    place.write_text("a file")
    with pytest.raises(TierUnavailable, match=r"memory\.path="):
        SlabFolder(place)
    with pytest.raises(TierUnavailable, match="Not a directory"):
        SlabFolder(place / "below")


def test_a_folder_belongs_to_one_daemon(place: Path) -> None:
    """CFG."""
    folder = SlabFolder(place)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierUnavailable, match="in use by another daemon"):
        SlabFolder(place)
    assert len(os.listdir("/proc/self/fd")) == before
    folder.release()
    SlabFolder(place).remove()


def test_old_slabs_go_at_the_start_and_what_is_not_ours_stays(place: Path) -> None:
    """LEK."""
    folder = SlabFolder(place)
    os.close(folder.new_slab(1))
    (place / "notes").write_text("the operator's")
    folder.remove_old_slabs()
    assert not folder.slab_path(1).exists()
    folder.remove()
    assert [each.name for each in place.iterdir()] == ["notes"]


def test_a_folder_that_is_a_mount_point_of_its_own_is_left(small_tmpfs: Path) -> None:
    """CFG: an operator may mount a tmpfs for the slab."""
    folder = SlabFolder(small_tmpfs)
    os.close(folder.new_slab(1))
    folder.remove()
    assert list(small_tmpfs.iterdir()) == []


def test_default_folders_differ_by_address_and_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CFG."""
    monkeypatch.setattr(folder_module, "SHM", tmp_path)
    a, b = default_folder("ipc:///a"), default_folder("ipc:///b")
    assert a != b
    a.mkdir()
    (tmp_path / "kvstore-999999-000000000000").mkdir()
    assert all_folders() == [a]


# Limits


def test_more_than_the_machine_has_is_refused() -> None:
    """CFG."""
    with pytest.raises(TierUnavailable, match=r"slab of 8388608\.00GiB is too large: only .*GiB memory is avail"):
        require_memory(1 << 53, None)


def test_more_than_the_tmpfs_has_is_refused(small_tmpfs: Path) -> None:
    """CFG."""
    require_memory(11 << 20, small_tmpfs)
    with pytest.raises(TierUnavailable, match=f"is free in {small_tmpfs}"):
        require_memory(13 << 20, small_tmpfs)


def cgroups(root: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    (root / "cgroup").write_text(membership)
    for name, value in files.items():
        path = root / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value)
    return root / "cgroup", root / "fs"


def group(folder: str, names: tuple[str, str, str], limit: str, usage: int, cache: int) -> dict[str, str]:
    files = zip(names, (limit, str(usage), f"anon 5\n{names[2]} {cache}\nx 0"), strict=True)
    return {f"{folder}/{name if name.startswith('memory') else 'memory.stat'}": f"{value}\n" for name, value in files}


V2_NAMES = "memory.max", "memory.current", "inactive_file"
V1_NAMES = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
V2 = group("a", V2_NAMES, "1000", 500, 100) | group("a/b", V2_NAMES, "max", 300, 0)
V1 = group("memory/a/b", V1_NAMES, "1000", 350, 50)
V1_ROOT = group("memory", V1_NAMES, "900", 300, 0)


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        ("0::/a/b\n", V2, [600]),
        ("0::/\n", {}, []),
        ("4:memory:/a/b\n0::/\n", V1, [700]),  # hybrid: v2 is mounted, and memory is v1's
        ("4:cpu,memory:/a/b\n", V1, [700]),
        ("4:memory:/not/mounted/in/this/container\n0::/\n", V1_ROOT, [600]),
        ("", {}, []),
    ],
)
def test_what_a_cgroup_leaves(tmp_path: Path, membership: str, files: dict[str, str], left: list[int]) -> None:
    """CFG."""
    assert folder_module._cgroup_left_nbytes(*cgroups(tmp_path, membership, files)) == left


def test_more_than_the_cgroup_leaves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """CFG."""
    monkeypatch.setattr(folder_module, "_cgroup_left_nbytes", lambda: [1 << 20])
    require_memory(1 << 20, None)
    with pytest.raises(TierUnavailable, match="is left in this cgroup"):
        require_memory(2 << 20, None)
