"""The page of failures is true: the tests it names exist and are for that class, and what waits says what for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from tests.sources import ROOT, parse

CLOSED = {"COR", "IDN", "HSH", "HNG", "LEK", "RST", "DSK", "TTL"}  # a row waits only for a capability of its own
CLASSES = CLOSED | {"TPP", "CFG", "INS", "OBS", "PRF", "SEC"}
CAPABILITIES = {
    *("engine connectors", "nodes", "prefill/decode", "shared pool", "GPU copies", "recurrent layers"),
    *("compression", "metrics", "packaging", "documentation", "benchmarks"),
}
LATER = {"metrics", "documentation", "benchmarks"}  # nothing that a store, daemon, client or SSD must wait for
NUM_ROWS = 101


class Row(NamedTuple):
    """A row of a table."""

    code: str
    report: str
    symptom: str
    proof: str

    @property
    def tests(self) -> list[str]:
        return re.findall(r"`(\w+\.py::[^`]+)`", self.proof)

    @property
    def waits_for(self) -> list[str]:
        found = re.findall(r"\*\*waits for: ([^*]+)\*\*", self.proof)
        return [each for some in found for each in some.split(", ")]


def page() -> str:
    return (ROOT / "docs/failures.md").read_text()


def rows() -> list[Row]:
    """Query. All reports, by class."""
    found, code = [], ""
    for line in page().splitlines():
        if heading := re.match(r"## (\w+)", line):
            code = heading[1]
        elif line.startswith("| ") and code in CLASSES and not line.startswith("| report |"):
            report, symptom, proof = (cell.strip() for cell in line.strip("|").split("|"))
            found.append(Row(code, report, symptom, proof))
    return found


@cache
def docstrings(file: str) -> dict[str, str]:
    """Query. What each test of a file says of itself, and the file of all of them under the name "". A test of a state
    machine is an assignment: it has what the file says."""
    tree = parse(f"tests/{file}")
    said = {"": ast.get_docstring(tree) or ""}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            said[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            said[node.targets[0].id] = ""
    return said


def faults(row: Row) -> Iterator[str]:
    """Query. What is not true of a row."""
    if not (row.tests or row.waits_for):
        yield "neither tested nor waiting"
    for name in row.tests:
        file, _, test = name.partition("::")
        test = test.partition("[")[0]  # a parametrised one stands for the function
        if not (ROOT / "tests" / file).exists() or test not in docstrings(file):
            yield f"no such test: {name}"
        elif not re.search(rf"\b{row.code}\b", docstrings(file)[test] + docstrings(file)[""]):
            yield f"{name} does not say {row.code}"
    for capability in row.waits_for:
        if capability not in CAPABILITIES or (row.code in CLOSED and capability in LATER):
            yield f"waits for {capability}"


@pytest.mark.parametrize("code", sorted(CLASSES))
def test_every_report_is_tested_or_waits_for_something_that_is_named(code: str) -> None:
    """All classes, COR to SEC."""
    mine = [row for row in rows() if row.code == code]
    assert mine
    assert {row.report: found for row in mine if (found := list(faults(row)))} == {}


def test_no_report_is_lost_or_told_twice_in_a_class() -> None:
    """All classes."""
    found = rows()
    assert len(found) == NUM_ROWS
    assert all(all(row) for row in found)
    assert len({(row.code, row.report) for row in found}) == len(found)
    prefixes = (
        "LMCache|vLLM|SGLang|Mooncake|production-stack|dynamo|ray|lmdeploy|LightLLM|aiter|local-inference-lab/vllm"
    )
    for row in found:
        for report in re.split(r", (?!a )", row.report):
            assert re.fullmatch(rf"({prefixes}) (#\d+( PR|, a comment)?|\d\.\d\.\d)", report), report


def test_the_capabilities_are_those_that_the_page_explains() -> None:
    """All classes."""
    _, _, table = page().partition("## What rows wait for")
    explained = set(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)) - {"capability"}
    assert explained == CAPABILITIES
    assert {each for row in rows() for each in row.waits_for} == CAPABILITIES, "none that nobody waits for"


@pytest.mark.parametrize(
    ("proof", "fault"),
    [
        ("soon", "neither tested nor waiting"),
        ("`test_hit.py::test_nothing`", "no such test: test_hit.py::test_nothing"),
        ("`test_nowhere.py::test_nothing`", "no such test: test_nowhere.py::test_nothing"),
        (
            "`test_hit.py::test_one_kept_array_is_said_once`",
            "test_hit.py::test_one_kept_array_is_said_once does not say COR",
        ),
        ("**waits for: better days**", "waits for better days"),
        ("**waits for: metrics**", "waits for metrics"),
        ("`test_hit.py::test_two_readers_may_report_one_damage`; **waits for: nodes, GPU copies**", ""),
        ("`test_hit.py::test_a_damaged_header_is_a_miss_that_takes_the_subtree_and_heals[0-hash]`", ""),
    ],
)
def test_what_is_not_true_of_a_row_is_seen(proof: str, fault: str) -> None:
    """The reader of the page can fail."""
    assert list(faults(Row("COR", "LMCache #1", "something", proof))) == ([fault] if fault else [])
