"""Patterns of ECMA 262 as languages: matched, complemented, intersected and written again."""

from __future__ import annotations

import re
import unicodedata
import warnings
from contextlib import suppress
from functools import partial
from itertools import chain, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.grammar.regex import COMMON, ECMA, characters, nodes, parse
from core.grammar.schema import automata
from core.grammar.schema.ecma import language
from core.grammar.schema.formats import FORMATS
from core.grammar.schema.languages import Language, Languages
from core.grammar.schema.limits import Budget, Limits
from core.grammar.schema.regex_text import written
from core.stages.grammar import GrammarError
from plugins.grammars.regex import parse_regex
from plugins.grammars.rules import Alt, Chars, Expr, Repeat, Seq, Text, matches

WORDS = ["".join(letters) for length in range(5) for letters in product("ab1", repeat=length)]
SAME_IN_PYTHON = [
    "a", "^a", "a$", "^a|b$", "^(a|b)+$", "^a{2,3}$", "^(?!ab)", "^(?=a)(?!aa).*1$", "(?!b)", "^$", "", "a.b", "^[^a]*$", "\\d",
    "^\\D+$", "(^a)?b", "a?^b", "^(?:a|ab)(?:1|b1)$", "^(?!.*ab).*$", "a*$", "^(?!a$|b$)", "^(ab?){0,2}?1*$", "^\\w{3}$", "a+?b",
    "^(?:(?:a|b)1){1,2}$", "^[a-b]?[1]+$", "^(a*)*$", "^(a|)$",
]  # fmt: skip


@pytest.fixture
def languages() -> Languages:
    return Languages(Budget(Limits()))


def text_of(term: Language) -> str:
    text = written(term, Limits().max_pattern)
    assert text is not None
    return text


@pytest.mark.parametrize("pattern", SAME_IN_PYTHON)
def test_matches_what_a_backtracking_matcher_does(languages: Languages, pattern: str) -> None:
    term = language(languages, pattern)
    found = {word for word in WORDS if re.search(pattern, word)}
    assert {word for word in WORDS if languages.matches(term, word)} == found
    plain = automata.plain_form(languages, term)
    assert plain is not None
    assert {word for word in WORDS if re.search(text_of(plain), word)} == found
    outside = automata.plain_form(languages, languages.complement(term))
    assert outside is not None
    others = set() if outside is languages.none else {word for word in WORDS if re.search(text_of(outside), word)}
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
     "^\\ud800\\u0041$", "\\ud83d\\ud83d", "\\u{d83d}\\ude00", "[\\ud800\\u0041]", "\\ud83d\\u{de00}", "a{٣}",
     "(^a)*", "a{5000}", "((a{1,4000}){1,4000})", "*"],
)  # fmt: skip
def test_what_it_does_not_know_is_refused(languages: Languages, pattern: str) -> None:
    with pytest.raises(GrammarError):
        language(languages, pattern)


PIECES = ["a", "{", "}", "1", ",", "٣", "²", "(", ")", "?", "<n>", "P<n>", "[", "]", "^", "-", "|", "*", "+", "$", "\\", "\\u",
    "d800", "dc", "\\x", "\\p", "{L}", "zz", "é", "🔥", "\ud800", ".", "\\0", "\\c", "\\U", "0010ffff", "9999999"]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"a{٣}|a{}|{x}", ["a{٣}", "a{}", "{x}"], ["aaa", "a", "x"]),
        (r"\A\x{61}\U0001f600\z", ["a😀"], ["a"]),
        (r"(?P<n>\s)(?<m>.)", [" a", "\t\x85"], ["\u00a0a", " \n", " \r", "\x0b\u2028"]),
        (r"[^\]a]", ["b", "[", "\n"], ["", "]", "a", "/a]"]),
        (r"\W", ["-", " ", "\u2028", "€"], ["圾", "é", "a", "_", "٥", "²", "\u0301", "\u203f", "\u0378"]),
        (r"\D", ["a", "圾", "²"], ["5", "٥"]),
        (r"\S", ["a", "\u200b"], [" ", "\x1c", "\x85", "\u00a0", "\ufeff"]),
        (r"[^\d\s]", ["a"], ["5", "٥", "\x1c", "\ufeff"]),
        (r"[^\W_]", ["a", "5"], ["é", "_", "-"]),
        (r"[\s\S]", ["a", "\n", "\ufeff", "\x1c", "\U0010ffff"], [""]),
        (r"[^\s\S]|[^\w\W]", [], ["a", "\ufeff"]),
        (r"\é\_\/", ["é_/"], ["\\é_/"]),
    ],
)
def test_a_grammar_of_its_own_means_what_all_dialects_do(pattern: str, good: list[str], bad: list[str]) -> None:
    expr = parse_regex(pattern)
    assert [text for text in good if not matches(expr, text)] == []
    assert [text for text in bad if matches(expr, text)] == []


@pytest.mark.parametrize(
    "pattern",
    ["a{,}", "[^]a]", "[]a]", "[^]", "[+--]", r"\<a", r"\ud83d\ude00", "a{,3}", "(?=a)b",
     "(?i)a", r"\p{L}", "[]", "[[a]", "[a&&b]", "[a--b]", r"\bword", r"(a)\1", r"\u{d83d}\ude00",
     r"\ud83d\udczz", r"\ud800\u0041", "a^b", "(^a)*", "a{100001}"],
)  # fmt: skip
def test_what_dialects_do_not_agree_on_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError, match="^regular expression: "):
        parse_regex(pattern)


CLASSES = [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "."]
IN_CLASSES = [
    r"\d",
    r"\D",
    r"\w",
    r"\W",
    r"\s",
    r"\S",
    "]",
    r"\]",
    "[",
    "^",
    "-",
    "a",
    "c",
    "é",
    "圾",
    "&&",
    "+",
    r"\x85",
    ".",
    "b",
]


def drawn(expr: Expr, rng: Random) -> str | None:
    """A text of `expr`; None where there is none, or the one drawn is long."""
    match expr:
        case Text(text):
            return text
        case Chars(ranges):
            first, last = rng.choice(ranges) if ranges else (0, -1)
            return chr(rng.choice((first, last, rng.randint(first, last)))) if ranges else None
        case Alt(options):
            return drawn(rng.choice(options), rng)
        case Repeat(part, least, most):
            parts: tuple[Expr, ...] = (part,) * rng.randint(least, least + 2 if most is None else min(most, least + 2))
        case Seq(parts):
            pass
        case _:
            raise TypeError(f"{expr} is no regular expression by itself")
    texts = [drawn(part, rng) for part in parts] if len(parts) < 100 else [None]
    return None if None in texts else "".join(text for text in texts if text is not None)


def in_python(pattern: str) -> list[re.Pattern[str]]:
    """With Unicode's sets, and with ASCII's; none where it is no pattern of Python's."""
    with warnings.catch_warnings(), suppress(re.error, OverflowError):
        warnings.simplefilter("ignore")  # of what might mean something else in a later Python
        return [re.compile(pattern), re.compile(pattern, re.ASCII)]
    return []


def in_ecma(pattern: str) -> tuple[Languages, Language] | None:
    languages = Languages(Budget(Limits()))
    with suppress(GrammarError):
        return languages, language(languages, f"^(?:{pattern})$")
    return None


def check_what_is_drawn(pattern: str, seed: int = 0, tries: int = 8) -> int:
    """How many texts were compared."""
    try:
        expr = parse_regex(pattern)
    except GrammarError:
        return 0
    rng, num_compared, ecma = Random(seed), 0, in_ecma(pattern)
    for text in (drawn(expr, rng) for _ in range(tries)):
        if text is not None:
            num_compared += 1
            assert all(one.fullmatch(text) for one in in_python(pattern)), f"{pattern!r} gives {text!r}: not in Python"
            if ecma is not None:
                assert ecma[0].matches(ecma[1], text), f"{pattern!r} gives {text!r}: not in ECMAScript"
    return num_compared


@pytest.mark.parametrize(
    "pattern", [*CLASSES, *(f"[^{one}]" for one in CLASSES), r"[\d\W]", r"[^\d\s]", r"[\s\S]", r"[^\W\d_]"]
)
def test_every_character_of_a_class_is_in_it_in_each_dialect(pattern: str) -> None:
    node = parse(pattern, COMMON)
    assert isinstance(node, nodes.Chars) and node.ranges
    text = "".join(map(chr, chain.from_iterable(range(first, last + 1) for first, last in node.ranges)))
    for one in in_python(f"{pattern}*"):
        assert one.fullmatch(text)
    of_ecma = parse(pattern, ECMA)
    assert isinstance(of_ecma, nodes.Chars)
    assert characters.intersection(node.ranges, of_ecma.ranges) == node.ranges


@given(st.lists(st.sampled_from(IN_CLASSES), min_size=1, max_size=5), st.booleans(), st.integers(0, 99))
@settings(max_examples=300, deadline=None)
def test_what_a_class_gives_is_in_it_in_each_dialect(pieces: list[str], negative: bool, seed: int) -> None:
    check_what_is_drawn(f"x[{'^' if negative else ''}{''.join(pieces)}]{{1,3}}", seed)


@given(st.lists(st.sampled_from([*PIECES, *CLASSES, "[^", "b]", "(?:", ")*"]), max_size=10), st.integers(0, 99))
@settings(max_examples=400, deadline=None)
def test_what_a_pattern_gives_is_in_it_in_each_dialect(pieces: list[str], seed: int) -> None:
    check_what_is_drawn("".join(pieces), seed)


def test_texts_are_compared() -> None:
    for pattern in (r"(?:\W|[^\d\s])+x{2,}", r".{3}|\S?"):
        assert check_what_is_drawn(pattern, tries=50) == 50


@given(st.lists(st.sampled_from(PIECES), max_size=12))
@settings(max_examples=400, deadline=None)
def test_any_text_is_a_pattern_or_refused(pieces: list[str]) -> None:
    """In every dialect; any other error would be a fault of the server's."""
    for read in (partial(language, Languages(Budget(Limits()))), parse_regex, partial(parse_regex, anywhere=True)):
        with suppress(GrammarError):
            read("".join(pieces))


@pytest.mark.timeout(60)
def test_long_patterns(languages: Languages) -> None:
    whole = language(languages, "^" + "a" * 5000 + "$")
    assert languages.matches(whole, "a" * 5000) and not languages.matches(whole, "a" * 4999)
    assert language(languages, "a" * 5000)
    with pytest.raises(GrammarError):
        language(Languages(Budget(Limits())), "a?" * 3000 + "^")
    for pattern in ("a{" + "9" * 5000 + "}", "\\x{" + "0" * 5000 + "}"):
        for read in (partial(language, languages), parse_regex):
            with pytest.raises(GrammarError):
                read(pattern)


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


@pytest.mark.parametrize(
    ("pattern", "low", "high", "expected"),
    [
        ("^abc$", 0, 2, False), ("^abc$", 3, 3, True), ("^a{3}$", 4, None, False), ("^(aa)*$", 3, 3, False),
        ("^(aa)*$", 3, 4, True), ("^(aaa)*$", 100_000, 100_001, False), ("^(aaa)*$", 100_000, 100_002, True),
        ("^(aa)*b$", 1001, 1001, True), ("^(aa)*b$", 1000, 1000, False), ("a", 10**9, None, True), ("^(?!a).?$", 2, 9, False),
        ("^((aa)*|(aaa)*b)$", 15, 15, False), ("^((aa)*|(aaa)*b)$", 19, 19, True), ("^$", 1, None, False),
    ],
)  # fmt: skip
def test_lengths(languages: Languages, pattern: str, low: int, high: int | None, expected: bool) -> None:
    assert automata.has_length(languages, language(languages, pattern), low, high, Limits()) == expected


def test_lengths_that_take_too_long_are_not_ruled_out(languages: Languages) -> None:
    term = language(languages, "^(a|b)*a(a|b){14}$")
    assert automata.has_length(languages, term, 3, 4, Limits(max_states=4))


def test_sets_of_characters() -> None:
    assert characters.complement(characters.complement(characters.SPACE)) == characters.SPACE
    assert characters.intersection(characters.WORD, characters.complement(characters.DIGIT))[0] == (0x41, 0x5A)
    assert not characters.contains(characters.ALL, 0xD800)
    assert characters.of_property("Script=Greek") is None
    for name in ("Nd", "Cn", "Co", "Lo"):
        every = [point for point in range(characters.LAST + 1) if unicodedata.category(chr(point)) == name]
        assert characters.of_categories(name) == characters.union((point, point) for point in every)


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
