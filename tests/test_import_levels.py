"""Calls go one way: engine -> connector -> client -> wire -> daemon -> core -> prefix tree. This reads the imports and
keeps it true. Every fact is a table below; to add a dependency is to add a word here, and in pyproject.toml."""

import ast
import fnmatch
import sys

import pytest

from tests.sources import LEVELS, imports, parse, source_files

# Which file may import what is neither ours nor the standard library's: (pattern, names); a file takes all that match.
THIRD_PARTY = [
    ("radix/*", {"numpy", "xxhash"}),
    ("transports/*", {"msgspec"}),
    ("transports/messages.py", {"xxhash"}),
    ("transports/zeromq.py", {"zmq"}),
    ("kvstore/*", {"numpy", "xxhash", "msgspec"}),
    ("kvstore/media/*", {"lmdb"}),
    ("kvstore/cli.py", {"typer", "rich"}),
    ("connectors/*", {"numpy"}),
    ("connectors/transformers.py", {"torch", "transformers", "xxhash"}),
]

# Pure: no sockets, files, threads, randomness or clock. Time arrives as `now_ms`, chance as a seeded `Random`.
PURE = [
    "radix/*",
    "transports/errors.py",
    "transports/messages.py",
    "transports/framing.py",
    "transports/session.py",
    "transports/directory.py",
    "kvstore/core/*",
]
PURE_STDLIB = {
    *("__future__", "abc", "array", "bisect", "collections", "contextlib", "copy", "dataclasses", "enum", "functools"),
    *("hashlib", "heapq", "itertools", "math", "numbers", "operator", "random", "string", "struct", "types", "typing"),
}
PURE_KVSTORE = ("kvstore.core", "kvstore.spec", "kvstore.ranks", "kvstore.errors", "kvstore.config")
IMPURE_CALLS = {"open", "input", "print", "breakpoint"}


def within(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def matches(file: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)


def level_faults(file: str, tree: ast.Module) -> list[str]:
    own = LEVELS[file.split("/")[0]]
    allowed = set().union(*(names for pattern, names in THIRD_PARTY if matches(file, [pattern])))
    faults = []
    for line, name in imports(file, tree):
        top = name.split(".")[0]
        if top in LEVELS:
            if LEVELS[top] > own:
                faults.append(f"{file}:{line} imports {name} from a higher level")
        elif top not in sys.stdlib_module_names and top not in allowed:
            faults.append(f"{file}:{line} imports {name}, which is not in its row of THIRD_PARTY")
    return faults


def purity_faults(file: str, tree: ast.Module) -> list[str]:
    faults = []
    for line, name in imports(file, tree):
        top = name.split(".")[0]
        if (
            (top in sys.stdlib_module_names and top not in PURE_STDLIB)
            or (top == "random" and name not in ("random", "random.Random"))
            or (top == "kvstore" and not within(name, *PURE_KVSTORE))
            or within(name, "zmq", "transports.zeromq", "numpy.random")
        ):
            faults.append(f"{file}:{line} is pure but imports {name}")
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=called)) if called in IMPURE_CALLS:
                faults.append(f"{file}:{node.lineno} is pure but calls {called}")
            case ast.Attribute(value=ast.Name(id="random"), attr=attribute) if attribute != "Random":
                faults.append(f"{file}:{node.lineno} is pure but uses random.{attribute}")
            case ast.Attribute(value=ast.Name(id="np" | "numpy"), attr="random" | "memmap" | "fromfile" | "load"):
                faults.append(f"{file}:{node.lineno} is pure but uses numpy.{node.attr}")
    return faults


@pytest.mark.parametrize("file", source_files(*LEVELS))
def test_no_package_imports_upward(file: str) -> None:
    assert not level_faults(file, parse(file))


@pytest.mark.parametrize("file", [file for file in source_files(*LEVELS) if matches(file, PURE)])
def test_pure_modules_reach_no_outside_world(file: str) -> None:
    assert not purity_faults(file, parse(file))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("radix/tree.py", "import kvstore"),
        ("radix/tree.py", "import msgspec"),
        ("radix/eviction/lru.py", "from ...transports import errors"),
        ("transports/session.py", "import zmq"),
        ("transports/zeromq.py", "from kvstore.spec import KVSpec"),
        ("kvstore/service/client.py", "import zmq"),
        ("kvstore/service/client.py", "def late():\n    import torch"),
        ("kvstore/core/store.py", "import rich"),
        ("kvstore/spec.py", "from connectors import common"),
        ("connectors/reference.py", "import torch"),
    ],
)
def test_the_level_check_sees(file: str, source: str) -> None:
    assert level_faults(file, ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "import socket",
        "import threading",
        "from time import monotonic",
        "import mmap",
        "import random\nrandom.random()",
        "from random import randint",
        "import numpy as np\nnp.random.default_rng()",
        "open('file')",
        "from ..clock import MonotonicClock",
        "from kvstore.media.memory import Slab",
        "from transports.zeromq import Server",
    ],
)
def test_the_purity_check_sees(source: str) -> None:
    assert purity_faults("kvstore/core/store.py", ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "import random\nrng = random.Random(1)\nrng.random()",
        "from random import Random",
        "from kvstore.spec import KVSpec",
        "from .slots import SlotPool",
        "from radix.tree import PrefixTree",
        "import numpy as np\nnp.zeros(3)",
    ],
)
def test_the_purity_check_lets_pass(source: str) -> None:
    assert not purity_faults("kvstore/core/store.py", ast.parse(source))
