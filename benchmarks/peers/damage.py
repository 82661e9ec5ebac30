"""Flips bytes of a stored block where a system keeps it: in its files, or in its processes' memory."""

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

NEEDLE_NBYTES = 64  # of bytes that follow from a block: nothing else looks like them
FLIPPED_NBYTES = 16
WINDOW_NBYTES = 64 << 20


def needle_of(data: bytes) -> bytes:
    """Query. Bytes from the middle."""
    return data[len(data) // 2 :][:NEEDLE_NBYTES]


def flip(files: Iterable[Path], pids: Iterable[int], needle: bytes) -> int:
    """Changes state. Damage every copy; how many were found. PermissionError: a process's memory is closed to us."""
    return sum(flip_in_file(path, needle) for path in files) + sum(flip_in_memory(pid, needle) for pid in pids)


def flip_in_file(path: Path, needle: bytes) -> int:
    """Changes state."""
    if path.stat().st_size < len(needle):
        return 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        found = 0
        at = mapped.find(needle)
        while at >= 0:
            mapped[at : at + FLIPPED_NBYTES] = _flipped(needle)
            found += 1
            at = mapped.find(needle, at + 1)
        mapped.flush()
    return found


def flip_in_memory(pid: int, needle: bytes) -> int:
    """Changes state. Linux: /proc/PID/mem, open to root and to the parent of the process."""
    found = 0
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    try:
        for first, last in _writable_ranges(pid):
            for at in _places(memory, first, last, needle):
                os.pwrite(memory, _flipped(needle), at)
                found += 1
    finally:
        os.close(memory)
    return found


def _flipped(needle: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in needle[:FLIPPED_NBYTES])


def _writable_ranges(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, access = line.split()[:2]
        first, last = (int(word, 16) for word in span.split("-"))
        if access.startswith("rw"):
            yield first, last


def _places(memory: int, first: int, last: int, needle: bytes) -> Iterator[int]:
    """Addresses of the needle in [first, last). Windows overlap, so that none is cut in two."""
    step = WINDOW_NBYTES - len(needle)
    for start in range(first, last, step):
        try:
            window = os.pread(memory, min(WINDOW_NBYTES, last - start), start)
        except OSError:  # a device's, or gone meanwhile
            return
        at = window.find(needle)
        while at >= 0:
            yield start + at
            at = window.find(needle, at + 1)
