"""The page of reported faults: each known row once, with tests that exist or with the reason why there is none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reported_faults.md"
NUMBERS = {
    "A": "2 3 4 5 6",
    "B": "1 2 4 5 6",
    "C": "1 3 4 5",
    "D": "1 2 3 4 5",
    "E": "1 2 3 4 6",
    "F": "2 3 4 5 6",
    "G": "1 2 3 4 5 7 8",
    "H": "1 2 3 4 5",
    "I": "1 2 4 5 6",
    "J": "1 3 4 5 6 7",
    "K": "1 3",
    "L": "1 2 3 5 7 8 9 10 11 12 13 14 15 16 17 18 20",
    "M": "1 3 4 5",
    "N": "1 2 3 4 5 6 7 8 9",
    "O": "1 2 3 5 6 7 8 9",
    "P": "1 2 3 4 5 6 7 8 9 10 12",
}
ROWS = [f"{section}{number}" for section, numbers in NUMBERS.items() for number in numbers.split()]
WITHOUT_TEST: set[str] = set()  # of a feature that is not built yet


class Row(NamedTuple):
    name: str
    report: str
    tests: list[str]
    note: str


def parsed() -> list[Row]:
    lines = re.findall(r"^\| ([A-Z]\d+) \| (.*?) \| (.*?) \| (.*?) ?\|$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    return [Row(name, report, re.findall(r"`([^`]+)`", tests), note.strip()) for name, report, tests, note in lines]


@cache
def functions_of(path: str) -> frozenset[str]:
    """`name` and `Class::name` of every test in a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return frozenset(names)


def test_each_row_appears_once_in_order() -> None:
    assert len(ROWS) == len(set(ROWS)) == 103
    assert [row.name for row in parsed()] == ROWS


def test_nothing_is_called_missing_that_has_been_built() -> None:
    missing = [row for row in parsed() if "Not built yet" in row.note]
    assert {row.name for row in missing} == WITHOUT_TEST
    assert "no grammar sampler" not in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("row", parsed(), ids=lambda row: row.name)
def test_a_row_names_its_report_and_tests_that_exist(row: Row) -> None:
    assert re.fullmatch(r"(\[[^\]]+\]\(https://[^)]+\)(<br>)?)+", row.report)
    assert bool(row.tests) != (row.name in WITHOUT_TEST)
    assert row.tests or row.note
    for test in row.tests:
        path, _, name = test.partition("::")
        assert name.rpartition("::")[2].startswith("test_")
        assert name in functions_of(path), test
