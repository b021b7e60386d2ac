"""A small grammar of each kind: what a backend makes for its first grammar takes its time."""

from __future__ import annotations

from collections.abc import Container, Mapping

from core.request import GrammarSpec

SAMPLES: Mapping[str, str] = {
    "json_schema": '{"type":"integer"}',
    "json_object": "",
    "regex": "a+",
    "choice": '["a","b"]',
    "ebnf": 'root ::= "a"',
    "structural_tag": '{"structures":[{"begin":"<a>","schema":{"type":"integer"},"end":"</a>"}],"triggers":["<a>"]}',
}


def sample(kinds: Container[str]) -> GrammarSpec:
    """One of these kinds."""
    kind = next(kind for kind in SAMPLES if kind in kinds)
    return GrammarSpec(kind=kind, source=SAMPLES[kind])
