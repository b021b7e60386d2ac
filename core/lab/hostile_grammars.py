"""A thousand grammars that a server must live through: what engines died of (shared CVEs and issues in each family), and noise.

Deterministic. Each is to be refused with a reason or compiled, in time; the server goes on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from core.request import GrammarSpec

NUM_GRAMMARS: Final = 1000
SEED: Final = 20_240_614

NESTINGS = (10, 60, 65, 1_000, 10_000, 100_000)
WRONG_VALUES: Sequence[Any] = (True, None, -1, 1.5, "stsring", [], ["string", "weird"], {}, {"type": 3}, [[[]]])
KEYWORDS = (
    "type", "properties", "required", "additionalProperties", "patternProperties", "items", "prefixItems", "enum", "anyOf",
    "oneOf", "allOf", "not", "pattern", "format", "minLength", "maxLength", "minimum", "maximum", "multipleOf", "minItems",
    "maxItems", "uniqueItems", "contains", "$ref", "$defs", "if", "propertyNames", "dependentSchemas", "minProperties",
)  # fmt: skip
PATTERNS = (
    "(a+)+$", "(a|a)*b", "(a|aa)+$", "([a-zA-Z]+)*$", "^(([a-z])+.)+[A-Z]([a-z])+$", "(x+x+)+y", "(.*)*x", "((.*)*)*",
    "(a?){50}a{50}", "(.*a){12}", "(.*a){30}", "(.{1,100}){100}", "(a{1,100}b{1,100}){16}", "[^a]{1024}", ".{1024}",
    r"\p{L}{500}", r"(\p{L}\p{M}*){200}", r"(\w{1,63}\.){1,16}\w{2,63}", "(?=a)b", "(?!a)b", "(?<=x)a", "(?<!x)a", r"(a)\1",
    r"\k<n>", "^+[a-z]$", "^{2}times$", "*a", "a**", "a{2}{3}{4}", "a{3,2}", "a{1,100000}", "a{99999999999}", "[.*", "(a", "a)",
    "[z-a]", "[]", "[^]", "[[:alpha:]]", "[a&&[b]]", "\\", r"\x", r"\u{110000}", r"\ud800", r"\q", "", "^", "$", "^$", "|", "||a",
    "()", "(?:)", "(?i)abc", "(?<n>a)", "(?P<n>a)", r"\bword\b", r"\A\Z", "a\x00b", "é{400}", "🔥{300}", "(" * 64 + ")" * 64,
    "(" * 65 + ")" * 65, "[" * 300, "(" * 250 + "a" + ")" * 250, "|".join(f"word{n}" for n in range(60)), "(?:a?" * 60 + ")" * 60,
    "(((a{16}){16}){16}){4}", "(((a{16}){16}){16}){5}", "(a*)*" * 80, "(a|b|c|d|e|f|g|h)*x" * 20,
    "[ab]*a[ab]{14}", "[ab]*a[ab]{200}",
)  # fmt: skip
EBNF = (
    "", "root", "root ::=", 'rout::="route"', "root ::= root", "root ::= root root", 'root ::= root "x" | "y"',
    'root ::= a\na ::= root "x" | "y"', 'root ::= a\na ::= b\nb ::= c\nc ::= a', 'root ::= a root | "x"\na ::= ""',
    'root ::= root root | "a" | ""', 'root ::= ("a"*)*', 'root ::= (("a"?)*)*', 'root ::= ""', "root ::= undefined",
    'root ::= "unclosed', "root ::= [unclosed", "root ::= [z-a]", "root ::= []", "root ::= [^]", 'root ::= "a"{3,2}',
    'root ::= "a"{100000}', 'root ::= ("a"{1000}){1000}', 'root ::= "a" |', "root ::= |", "root ::= *", 'root ::= + "a"',
    'root ::= "a" "b" )', "root ::= ((((", 'root ::= "\\q"', 'root ::= "\\ud800"', 'root ::= "\x00"', "root ::= /regex/",
    'root ::= "a"\nroot ::= "b"', 'root::="a"', 'root = "a"', 'root: "a"', "start: /a+/", "%%%%", "root ::= .", "root ::= .*",
    'root ::= (?= "a")', 'root ::= TagDispatch(("a", b))', 'root ::= "a" # ' + "(" * 5000, "root ::= " + "(" * 60_000,
    "root ::= " + "(" * 60 + '"a"' + ")" * 60, "root ::= " + '"a" | ' * 3000 + '"a"', "root ::= " + '"a" | ' * 1000 + '"b"',
    "root ::= " + '("a" | ' * 60 + '"b"' + ")" * 60, "root ::= " + '"a"? ' * 900, "root ::= " + "[a-z]* " * 900,
    "x" * 1_000_000, "root ::= " + " " * 60_000, "\n" * 60_000, 'root ::= "' + "a" * 60_000 + '"',
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hostile:
    name: str  # family and number
    spec: GrammarSpec


def hostile_grammars() -> list[Hostile]:
    """All `NUM_GRAMMARS`; the families in turn, so that the first few dozen have some of each."""
    families = [_numbered(name, make()) for name, make in FAMILIES.items()]
    found = list(_in_turn(families))[:NUM_GRAMMARS]
    rng = random.Random(SEED)
    found += [Hostile(f"noise {n}", _noise(rng)) for n in range(NUM_GRAMMARS - len(found))]
    return found


def _numbered(name: str, specs: Iterator[GrammarSpec]) -> Iterator[Hostile]:
    return (Hostile(f"{name} {number}", spec) for number, spec in enumerate(specs))


def _in_turn(families: list[Iterator[Hostile]]) -> Iterator[Hostile]:
    while families:
        left = []
        for family in families:
            if (found := next(family, None)) is not None:
                left.append(family)
                yield found
        families = left


def _schema(value: Any) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", source=value if isinstance(value, str) else json.dumps(value))


def _wrapped(opening: str, closing: str, levels: int) -> str:
    return opening * levels + "{}" + closing * levels


def _nested() -> Iterator[GrammarSpec]:
    """llama.cpp 26600, 25283; GHSA-7rgv-gqhr-fxg3: a stack overflows."""
    for levels in NESTINGS:
        yield _schema(_wrapped('{"properties":{"a":', "}}", levels))
        yield _schema(_wrapped('{"items":', "}", levels))
        yield _schema(_wrapped('{"anyOf":[', "]}", levels))
        yield _schema(_wrapped('{"not":', "}", levels))
        yield _schema("[" * levels)
        yield _schema('{"const":' + "[" * levels + "]" * levels + "}")
        yield GrammarSpec(kind="choice", source="[" * levels + "]" * levels)
        yield GrammarSpec(kind="regex", source="(" * levels + "a" + ")" * levels)
        yield GrammarSpec(kind="regex", source="[" * levels)
        yield GrammarSpec(kind="ebnf", source="root ::= " + "(" * levels + '"a"' + ")" * levels)
        yield GrammarSpec(kind="structural_tag", source=_wrapped('{"structures":[', "]}", levels))


def _malformed() -> Iterator[GrammarSpec]:
    """CVE-2025-48942: an unknown type; and every keyword with what it cannot be."""
    yield from map(
        _schema, ("", "[]", "3", '"x"', "null", "true", "false", "{", "{}}", "nul", "{'a':1}", '{"a":NaN}', "\x00")
    )
    value: Any
    for keyword in KEYWORDS:
        for value in (True, None, -1, "stsring", [], ["string", "weird"], {}):
            yield _schema({keyword: value})
            if value in (None, "stsring"):
                yield _schema({"type": "object", "properties": {"a": {keyword: value}}, "required": ["a"]})


def _references() -> Iterator[GrammarSpec]:
    """CVE-2025-57809: a reference to itself; and references that double at each level."""
    for target in (
        "#",
        "#/$defs/a",
        "#/nowhere",
        "#/$defs/a/b/c",
        "#a",
        "",
        "http://127.0.0.1:1/x",
        "file:///etc/passwd",
        "%zz",
        "#/%",
    ):
        yield _schema({"$ref": target})
        yield _schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": target}}})
        yield _schema(
            {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}], "$defs": {"a": {"anyOf": [{"$ref": target}, {}]}}}
        )
    for levels in (8, 16, 30, 60, 400):
        for keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
            refs = {f"a{n}": {keyword: [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(levels)}
            yield _schema({"$ref": "#/$defs/a0", "$defs": {**refs, f"a{levels}": {"type": "string"}}})
        chain = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(levels)}
        yield _schema({"$ref": "#/$defs/a0", "$defs": {**chain, f"a{levels}": {"$ref": "#/$defs/a0"}}})
    tree = {"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}, "required": ["l", "r"]}
    yield _schema(tree)  # has no finite instance
    yield _schema({**tree, "required": []})


def _large() -> Iterator[GrammarSpec]:
    """CVE-2025-58446: an enum takes minutes to compile."""
    for count, length in ((10_000, 50), (1_024, 50), (1_025, 5), (1_000, 1), (500, 120), (5_000, 3)):
        words = [f"{n:x}".rjust(length, "x") for n in range(count)]
        yield _schema({"enum": words})
        yield _schema({"anyOf": [{"const": word} for word in words]})
        yield GrammarSpec(kind="choice", source=json.dumps(words))
        yield GrammarSpec(kind="ebnf", source="root ::= " + " | ".join(f'"{word}"' for word in words))
        yield _schema({"type": "object", "properties": {word: {"type": "string"} for word in words}})
        yield _schema({"type": "object", "required": words})
        yield _schema({"patternProperties": {word: {} for word in words}, "additionalProperties": False})
    for count in (100, 500, 1_000, 2_000):
        objects = [
            {"type": "object", "properties": {f"p{n}": {"type": "integer"}}, "required": [f"p{n}"]}
            for n in range(count)
        ]
        for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
            yield _schema({keyword: objects})
    prefixes = ["a" * n for n in range(300)]
    yield GrammarSpec(kind="choice", source=json.dumps(prefixes))
    yield GrammarSpec(kind="choice", source=json.dumps(["x" * 60_000]))
    yield _schema({"const": "x" * 60_000})
    yield _schema({"const": list(range(10_000))})


def _numbers() -> Iterator[GrammarSpec]:
    """Counts and bounds that a compiler would unroll."""
    for value in (0, -1, 1, 10**3, 10**6, 10**9, 10**18, 10**30, 1e308, 1e-308, 0.1, -0.0):
        yield _schema({"type": "array", "items": {"type": "string"}, "minItems": value})
        yield _schema({"type": "array", "items": {"type": "string"}, "minItems": 10, "maxItems": value})
        yield _schema({"type": "string", "minLength": value})
        yield _schema({"type": "string", "maxLength": value})
        yield _schema({"type": "number", "minimum": value, "maximum": -value})
        yield _schema({"type": "integer", "exclusiveMinimum": value})
        yield _schema({"type": "number", "multipleOf": value})
        yield _schema({"type": "object", "minProperties": value})
        yield _schema({"type": "array", "uniqueItems": True, "minItems": value, "items": {"enum": [1, 2]}})
    digits = "9" * 4_000
    yield _schema(f'{{"minimum":{digits}}}')
    yield _schema(f'{{"minimum":{digits}{digits}}}')
    yield _schema('{"multipleOf":1e-400}')


def _patterns() -> Iterator[GrammarSpec]:
    """Catastrophic for what backtracks; llama.cpp 22606: a quantifier with nothing before it."""
    for pattern in PATTERNS:
        yield GrammarSpec(kind="regex", source=pattern)
        yield _schema({"type": "string", "pattern": pattern})
        yield _schema(
            {"type": "object", "patternProperties": {pattern: {"type": "integer"}}, "additionalProperties": False}
        )


def _rules() -> Iterator[GrammarSpec]:
    """Left recursion (CVE-2025-57809), rules that double, what is no grammar (llama.cpp 4492)."""
    yield from (GrammarSpec(kind="ebnf", source=source) for source in EBNF)
    for levels in (10, 20, 30, 50, 1_000):
        doubled = "".join(f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(levels))
        yield GrammarSpec(kind="ebnf", source=f'root ::= r0\n{doubled}r{levels} ::= "a"')
        yield GrammarSpec(kind="ebnf", source=f'root ::= r0\n{doubled}r{levels} ::= "a" | ""')
        chain = "".join(f"r{n} ::= r{n + 1}\n" for n in range(levels))
        yield GrammarSpec(kind="ebnf", source=f"root ::= r0\n{chain}r{levels} ::= r0")
        yield GrammarSpec(kind="ebnf", source=f'root ::= r0\n{chain}r{levels} ::= r0 "a" | "b"')


def _tags() -> Iterator[GrammarSpec]:
    structure = {"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}
    tag = {"structures": [structure], "triggers": ["<a"]}
    for name in (*tag, "at_least_one", "stop_after_first", "separator", "unknown"):
        for value in WRONG_VALUES:
            yield GrammarSpec(kind="structural_tag", source=json.dumps({**tag, name: value}))
    for name in structure:
        for value in WRONG_VALUES:
            changed = {**tag, "structures": [{**structure, name: value}]}
            yield GrammarSpec(kind="structural_tag", source=json.dumps(changed))
    for count in (100, 1_000, 2_000):
        many = [{**structure, "begin": f"<a{n}>"} for n in range(count)]
        yield GrammarSpec(kind="structural_tag", source=json.dumps({"structures": many, "triggers": ["<a"]}))
    for triggers in ([""], ["<", "<a", "<a>"], ["\x00"], ["\ud800"], ["<a"] * 1000):
        yield GrammarSpec(kind="structural_tag", source=json.dumps({**tag, "triggers": triggers}))


FAMILIES: dict[str, Callable[[], Iterator[GrammarSpec]]] = {
    "nested": _nested,
    "malformed": _malformed,
    "references": _references,
    "large": _large,
    "numbers": _numbers,
    "pattern": _patterns,
    "rules": _rules,
    "tags": _tags,
}
SOUND = (
    ("json_schema", '{"type":"object","properties":{"a":{"type":"array","items":{"enum":[1,"x"]}}},"required":["a"]}'),
    ("regex", "(ab|[c-f]{2,5})+x?"),
    ("ebnf", 'root ::= item ("," item)*\nitem ::= [a-z]+ | "(" root ")"'),
    ("structural_tag", '{"structures":[{"begin":"<a>","schema":{"type":"integer"},"end":"</a>"}],"triggers":["<a"]}'),
    ("choice", '["red","green"]'),
)


def _noise(rng: random.Random) -> GrammarSpec:
    """A sound grammar, some of whose characters are lost, doubled, swapped or others."""
    kind, source = rng.choice(SOUND)
    letters = list(source)
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(letters))
        change = rng.randrange(4)
        if change == 0:
            del letters[place]
        elif change == 1:
            letters[place:place] = letters[place : place + 8]
        elif change == 2:
            letters[place] = rng.choice('{}[]()"\\|*+?,:.$^\x00\ud800é🔥a1 ')
        else:
            other = rng.randrange(len(letters))
            letters[place], letters[other] = letters[other], letters[place]
    return GrammarSpec(kind=kind, source="".join(letters))
