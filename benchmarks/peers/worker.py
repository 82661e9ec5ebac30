"""The worker's side: one system behind JSON lines. Runs in that system's environment; `benchmarks.peers.process` is the
other side.

    in    {"do": "store", "prompt": [number, num_blocks, block_nbytes]}     one line, one command
    out   {"seconds": 0.012}   or   {"refused": "what the system said"}     one line each

Bytes never travel: they are made here from the prompt, and compared here. What is not a refusal ends the worker, and
the last line of its log says why. At the end of its input it closes the system.
"""

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

from benchmarks.peers.system import Place, Prompt, Refused, System, caller_memory

Reply = dict[str, Any]


class Desk:
    """Carries out commands on one system."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._memory = caller_memory(1, 8)

    def answer(self, command: dict[str, Any]) -> Reply:
        """Changes state. One method a command: its name is in `do`, the rest are its arguments."""
        work: Callable[..., Reply] = getattr(self, f"do_{command.pop('do')}")
        if "prompt" in command:
            command["prompt"] = Prompt(*command["prompt"])
        try:
            return work(**command)
        except Refused as exc:
            return {"refused": str(exc)}

    def do_attach(self, num_blocks: int, block_nbytes: int) -> Reply:
        """Changes state."""
        self._memory = caller_memory(num_blocks, block_nbytes)
        self._system.attach(self._memory)
        return {}

    def do_store(self, prompt: Prompt) -> Reply:
        """Changes state. The blocks are made first, and not timed."""
        prompt.fill(self._memory[0])
        _prepare(prompt)
        with timed() as reply:
            self._system.store(prompt)
        return reply

    def do_settle(self) -> Reply:
        """Changes state."""
        self._system.settle()
        return {}

    def do_look_up(self, prompt: Prompt) -> Reply:
        """Changes state."""
        self._system.release()
        _prepare(prompt)
        with timed() as reply:
            found = self._system.look_up(prompt)
        return {**reply, "found": found}

    def do_retrieve(self, prompt: Prompt) -> Reply:
        """Changes state. `served`: how many leading blocks came; `wrong`: which of those are not what was stored."""
        targets = self._memory[1]
        targets.fill(0)  # so that a copy which did not happen shows
        _prepare(prompt)
        with timed() as reply:
            served = self._system.retrieve(prompt)
        return {**reply, "served": served, "wrong": prompt.wrong(targets[:served])}

    def do_forget(self) -> Reply:
        """Changes state."""
        self._system.forget()
        return {}

    def do_locate(self) -> Reply:
        """Changes state: blanks the caller's memory, so that only the system's copies are left to be found."""
        self._memory.fill(0)
        return {
            "files": [str(path) for path in self._system.stored_files()],
            "holders": list(self._system.holders()),
        }


@contextlib.contextmanager
def timed() -> Iterator[Reply]:
    reply: Reply = {}
    before = time.perf_counter()
    yield reply
    reply["seconds"] = time.perf_counter() - before


def _prepare(prompt: Prompt) -> None:
    """An engine has its token ids and keys at hand; making ours is not what is measured."""
    assert len(prompt.token_ids) and prompt.keys


def serve(system: System, commands: IO[str], replies: IO[str]) -> None:
    """Changes state. Until the commands end."""
    desk = Desk(system)
    _say(replies, {"ready": True})
    for line in commands:
        _say(replies, desk.answer(json.loads(line)))


def _say(replies: IO[str], reply: Reply) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _own_stdout() -> IO[str]:
    """Changes state. Only replies go to the other side; whatever a system prints goes to the log."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


def _leave(signum: int, frame: FrameType | None) -> None:
    sys.exit(1)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--adapter", required=True, help="module:class")
    options.add_argument("--options", type=json.loads, required=True, help="its keyword arguments, as JSON")
    options.add_argument("--name", required=True)
    options.add_argument("--disk", type=Path, required=True)
    options.add_argument("--shared", type=Path, required=True)
    given = options.parse_args()
    replies = _own_stdout()
    signal.signal(signal.SIGTERM, _leave)
    module, name = given.adapter.split(":")
    make: Callable[..., System] = getattr(importlib.import_module(module), name)
    system = make(Place(given.name, given.disk, given.shared), **given.options)
    with contextlib.suppress(BrokenPipeError), contextlib.closing(system):  # the other side may have been killed
        serve(system, sys.stdin, replies)
    for folder in (given.disk, given.shared):  # which it then cannot remove
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
