"""A file per block: written under another name and renamed, read into the caller's memory; no fsync."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.system import Bytes, Place, Prompt


class PlainFiles:
    """`shared`: in shared memory instead of on disk."""

    def __init__(self, place: Place, *, shared: bool = False) -> None:
        self._folder = (place.shared if shared else place.disk) / "blocks"
        self._folder.mkdir()

    def attach(self, memory: Bytes) -> None:
        self._memory = memory

    def store(self, prompt: Prompt) -> None:
        for key, block in zip(prompt.keys, self._memory[0], strict=False):
            unfinished = self._folder / f"{key}.part"
            with unfinished.open("wb", buffering=0) as file:
                file.write(block)
            unfinished.rename(self._folder / key)

    def settle(self) -> None:
        pass

    def release(self) -> None:
        pass

    def look_up(self, prompt: Prompt) -> int:
        return next((at for at, key in enumerate(prompt.keys) if not self._has(key)), prompt.num_blocks)

    def retrieve(self, prompt: Prompt) -> int:
        for at, (key, target) in enumerate(zip(prompt.keys, self._memory[1], strict=False)):
            try:
                with (self._folder / key).open("rb", buffering=0) as file:
                    num_read = file.readinto(target)
            except FileNotFoundError:
                return at
            if num_read != target.nbytes:
                return at
        return prompt.num_blocks

    def forget(self) -> None:
        shutil.rmtree(self._folder)
        self._folder.mkdir()

    def stored_files(self) -> Sequence[Path]:
        return sorted(self._folder.iterdir())

    def holders(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _has(self, key: str) -> bool:
        return os.path.exists(f"{self._folder}/{key}")
