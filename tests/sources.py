"""The repository's own source, as syntax trees, for the tests that read it."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEVELS = {"radix": 0, "transports": 1, "kvstore": 2, "connectors": 3}  # the packages of the wheel, lowest first


def source_files(*folders: str) -> list[str]:
    """Query. Paths relative to the repository, sorted, of every Python file in these top-level folders."""
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def parse(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(), filename=file)


def imports(file: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Query. (line, absolute dotted name) of each import, those inside functions and TYPE_CHECKING too. A name that
    `from` brings counts as a module of its own, since without importing nobody can tell."""
    package = file.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
