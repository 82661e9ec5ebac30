"""Class SEC of the failure table, and two habits: constructs that let bytes from outside become code or a fault become
silence are not in this repository at all, tests included."""

import ast
import re
import sys
from collections.abc import Iterator

import pytest

from tests.sources import LEVELS, ROOT, imports, parse, source_files

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_ATTRIBUTES = {"send_pyobj", "recv_pyobj", "unsafe_load", "full_load"}  # pickle by another name: pyzmq's, YAML's
BROAD = {"Exception", "BaseException"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}
CLI = "kvstore/cli.py"

Faults = Iterator[tuple[int, str]]


def last_name(node: ast.expr | None) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def unsafe_code(file: str, tree: ast.Module) -> Faults:
    for line, name in imports(file, tree):
        if name.split(".")[0] in UNSAFE_MODULES:
            yield line, f"imports {name}"
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=called)) if called in UNSAFE_CALLS:
                yield node.lineno, f"calls {called}"
            case ast.Attribute(attr=attribute) if attribute in UNSAFE_ATTRIBUTES:
                yield node.lineno, f"uses {attribute}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="yaml"), attr="load" | "load_all")):
                yield node.lineno, "loads YAML that may name any class"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=given) if not any(
                each.arg == "weights_only" for each in given
            ):
                yield node.lineno, "loads weights by pickle, with a torch before 2.6"
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=False)):
                pass
            case ast.keyword(arg="allow_pickle"):
                yield node.value.lineno, "allows pickle"
            case ast.keyword(arg="weights_only", value=ast.Constant(value=False)):
                yield node.value.lineno, "loads weights by pickle"


def broad_handlers(file: str, tree: ast.Module) -> Faults:
    for node in ast.walk(tree):
        match node:
            case ast.ExceptHandler(type=None):
                yield node.lineno, "catches everything"
            case ast.ExceptHandler(type=ast.Tuple(elts=caught)) | ast.Call(func=_, args=caught) if (
                isinstance(node, ast.ExceptHandler) or last_name(node.func) == "suppress"
            ):
                if BROAD & {last_name(one) for one in caught}:
                    yield node.lineno, "catches too much"
            case ast.ExceptHandler(type=caught) if last_name(caught) in BROAD:
                yield node.lineno, "catches too much"


def asserts_stripped(file: str, tree: ast.Module) -> Faults:
    """Broken invariants stop the daemon by `assert`, so nothing here may start Python with -O."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value="-O" | "-OO" | "PYTHONOPTIMIZE") if file != "tests/test_bans.py":
                yield node.lineno, f"mentions {node.value}"
            case ast.Name(id="__debug__"):
                yield node.lineno, "branches on __debug__"


def environment_reads(file: str, tree: ast.Module) -> Faults:
    for line, name in imports(file, tree):
        if name.removeprefix("os.") in ENVIRONMENT:
            yield line, f"imports {name}"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=attribute) if attribute in ENVIRONMENT:
                yield node.lineno, f"reads os.{attribute}"


def prints(file: str, tree: ast.Module) -> Faults:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="print")):
                yield node.lineno, "prints"


EVERYWHERE = [unsafe_code, broad_handlers, asserts_stripped]
IN_PACKAGES = [environment_reads, prints]  # but for the command line


def faults(file: str, tree: ast.Module) -> list[str]:
    in_packages = file.split("/")[0] in LEVELS and file != CLI
    checks = EVERYWHERE + (IN_PACKAGES if in_packages else [])
    return [f"{file}:{line} {what}" for check in checks for line, what in check(file, tree)]


@pytest.mark.parametrize("file", source_files(*LEVELS, "benchmarks", "tests"))
def test_nothing_banned_is_used(file: str) -> None:
    """SEC."""
    assert not faults(file, parse(file))


def test_asserts_are_never_stripped() -> None:
    assert sys.flags.optimize == 0
    for name in ("Makefile", ".ci/run", ".ci/setup", "pyproject.toml"):
        assert not re.search(r"python\S*\s+-O|PYTHONOPTIMIZE|\$\(PY\) -O", (ROOT / name).read_text()), name


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "def late():\n    import shelve",
        "import dill as d",
        "eval('1')",
        "exec('1')",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "torch.load(path, weights_only=False)",
        "torch.load(path)",
        "socket.recv_pyobj()",
        "yaml.load(text)",
        "yaml.unsafe_load(text)",
        "try: f()\nexcept: pass",
        "try: f()\nexcept Exception: pass",
        "try: f()\nexcept builtins.BaseException as exc: raise",
        "try: f()\nexcept (OSError, Exception): pass",
        "with contextlib.suppress(Exception): f()",
        "with suppress(OSError, BaseException): f()",
        "subprocess.run([sys.executable, '-O', 'x.py'])",
        "if __debug__: check()",
        "import os\nos.environ['X']",
        "import os\nos.getenv('X')",
        "from os import environ",
        "print('x')",
    ],
)
def test_the_bans_see(source: str) -> None:
    assert faults("kvstore/core/store.py", ast.parse(source))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("kvstore/core/store.py", "try: f()\nexcept (OSError, ValueError): pass"),
        ("kvstore/core/store.py", "with suppress(FileNotFoundError): f()"),
        ("kvstore/core/store.py", "pattern = re.compile('x')"),
        ("kvstore/core/store.py", "np.load(path, allow_pickle=False)"),
        ("connectors/transformers.py", "model.eval()"),
        ("connectors/transformers.py", "torch.load(path, weights_only=True)"),
        ("kvstore/cli.py", "import os\nprint(os.environ)"),
        ("benchmarks/demo.py", "print('x')"),
    ],
)
def test_the_bans_let_pass(file: str, source: str) -> None:
    assert not faults(file, ast.parse(source))
