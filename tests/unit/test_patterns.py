"""Patterns of ECMA 262 as languages: matched, complemented, intersected and written again."""

from __future__ import annotations

import re
from itertools import product

import pytest

from core.grammar.schema import automata, characters
from core.grammar.schema.ecma import language
from core.grammar.schema.formats import FORMATS
from core.grammar.schema.languages import Languages
from core.grammar.schema.limits import Budget, Limits
from core.grammar.schema.regex_text import written
from core.stages.grammar import GrammarError

WORDS = ["".join(letters) for length in range(5) for letters in product("ab1", repeat=length)]
SAME_IN_PYTHON = [
    "a", "^a", "a$", "^a|b$", "^(a|b)+$", "^a{2,3}$", "^(?!ab)", "^(?=a)(?!aa).*1$", "(?!b)", "^$", "", "a.b", "^[^a]*$", "\\d",
    "^\\D+$", "(^a)?b", "a?^b", "^(?:a|ab)(?:1|b1)$", "^(?!.*ab).*$", "a*$", "^(?!a$|b$)", "^(ab?){0,2}?1*$", "^\\w{3}$", "a+?b",
    "^(?:(?:a|b)1){1,2}$", "^[a-b]?[1]+$", "^(a*)*$", "^(a|)$",
]  # fmt: skip


@pytest.fixture
def languages() -> Languages:
    return Languages(Budget(Limits()))


@pytest.mark.parametrize("pattern", SAME_IN_PYTHON)
def test_matches_what_a_backtracking_matcher_does(languages: Languages, pattern: str) -> None:
    term = language(languages, pattern)
    found = {word for word in WORDS if re.search(pattern, word)}
    assert {word for word in WORDS if languages.matches(term, word)} == found
    plain = automata.plain_form(languages, term)
    assert plain is not None
    assert {word for word in WORDS if re.search(written(plain), word)} == found
    outside = automata.plain_form(languages, languages.complement(term))
    assert outside is not None
    others = set() if outside is languages.none else {word for word in WORDS if re.search(written(outside), word)}
    assert others == set(WORDS) - found


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\s$", "\ufeff\u2003\u00a0\x0b", "\x85\u200ba"),  # not what Python's and Rust's \s are
        (r"^.$", "a\x85😀", "\n\r\u2028"),
        (r"^\d$", "5", "٥"),
        (r"^\w$", "a_Z", "é"),
        (r"^[\b]$", "\x08", "b"),
        (r"^\cJ$", "\n", "J"),
        (r"^\u{1F600}$", "😀", "a"),
        (r"^\ud83d\ude00$", "😀", "a"),
        (r"^\/\-\x41?$", [], ["/"]),
        (r"^\p{Lu}$", "AÉ", "a1"),
        (r"^\P{Letter}$", "1 ", "aé"),
        (r"^[^\W_]$", "a1", "_-"),
        (r"^[]$", [], ["", "a"]),
        (r"^[^]$", "\na", ["", "ab"]),
        (r"^[a-]$", "a-", "b"),
        (r"^[[a]$", "[a", "]"),
        (r"^[a&&b]$", "a&b", "|"),
    ],
)
def test_means_what_ecma_does(languages: Languages, pattern: str, good: str, bad: str) -> None:
    term = language(languages, pattern)
    assert [text for text in good if not languages.matches(term, text)] == []
    assert [text for text in bad if languages.matches(term, text)] == []


@pytest.mark.parametrize(
    "pattern",
    ["^+[a-z]$", "^{2}times$", "(?<=x)a", "[.*", "(a", "a)", "a{,3}", "a{3,2}", "\\Z", "(?i)a", "[a-\\d]", "[b-a]", "a**",
     "(a)\\1",      "(?P<a>b)", "\\", "\\u12", "\\ud83d", "\\p{Script=Greek}", "\\bword",
     "(^a)*", "a{5000}", "((a{1,4000}){1,4000})", "*"],
)  # fmt: skip
def test_what_it_does_not_know_is_refused(languages: Languages, pattern: str) -> None:
    with pytest.raises(GrammarError):
        language(languages, pattern)


def test_long_nests_are_bounded() -> None:
    for pattern in ("(" * 30_000, "(" * 30_000 + ")" * 30_000, "(a|" * 5000 + ")" * 5000):
        with pytest.raises((GrammarError, RecursionError)):
            language(Languages(Budget(Limits())), pattern)


def test_a_catastrophic_pattern_takes_no_time(languages: Languages) -> None:
    term = language(languages, "^(a+)+$")
    assert not languages.matches(term, "a" * 5000 + "b")  # a backtracking matcher would not come back


def test_emptiness(languages: Languages) -> None:
    both = languages.both
    assert automata.is_empty(languages, both(language(languages, "^a"), language(languages, "^b")), Limits())
    assert not automata.is_empty(languages, both(language(languages, "^a"), language(languages, "b$")), Limits())
    assert automata.is_empty(languages, both(language(languages, "^.{3}$"), language(languages, "^a{0,2}$")), Limits())
    large = both(language(languages, "^(a|b)*a(a|b){14}$"), language(languages, "^(a|b)*b(a|b){13}$"))
    assert not automata.is_empty(languages, large, Limits(max_states=50))  # not known, so not said


def test_sets_of_characters() -> None:
    assert characters.complement(characters.complement(characters.SPACE)) == characters.SPACE
    assert characters.intersection(characters.WORD, characters.complement(characters.DIGIT))[0] == (0x41, 0x5A)
    assert not characters.contains(characters.ALL, 0xD800)
    assert characters.of_property("Script=Greek") is None


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2024-02-29", "1999-12-31", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-13-01", "2024-1-1"]),
        ("time", ["12:00:00Z", "23:59:60Z", "01:02:03.5+23:59"], ["24:00:00Z", "12:00:00", "12:00:60Z", "12:00:00+24:00"]),
        ("date-time", ["2024-02-29T12:00:00Z"], ["2024-02-30T12:00:00Z", "2024-02-29 12:00:00Z"]),
        ("duration", ["P1D", "PT1H2M", "P4Y1M", "P2W"], ["P", "PT", "P1D2H", "P2W1D", "1D"]),
        ("email", ["a.b+c@x-y.org"], ["a@", "@b", "a..b@c.d", "a b@c.d"]),
        ("hostname", ["a", "www.example.com", "a-b.c1"], ["-a", "a-", "a..b", "xn--x", ""]),
        ("ipv4", ["0.0.0.0", "255.10.9.1"], ["256.0.0.1", "01.1.1.1", "1.1.1"]),
        ("ipv6", ["::", "::1", "1:2:3:4:5:6:7:8", "1::8", "::ffff:1.2.3.4"], [":", "1::2::3", "1:2:3:4:5:6:7", "12345::"]),
        ("uuid", ["2EB8AA08-AA98-11EA-B4AA-73B441D16380"], ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8-a"]),
        ("uri", ["http://a.b/c?d=e#f", "urn:x:y", "mailto:a@b.c"], ["a", "//x", "http://a b", "http://[::1"]),
        ("json-pointer", ["", "/a~0/b~1", "/"], ["a", "/~2", "/~"]),
    ],
)  # fmt: skip
def test_formats(languages: Languages, name: str, good: list[str], bad: list[str]) -> None:
    term = language(languages, FORMATS[name])
    assert [text for text in good if not languages.matches(term, text)] == []
    assert [text for text in bad if languages.matches(term, text)] == []
