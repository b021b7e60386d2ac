import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.stages.stop_strings import StopMatcher

letters = st.text(alphabet="abé", max_size=30)
stops_of = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4)


def slow_search(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) of the match that ends first; of several, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def pieces(text: str, cuts: list[int]) -> list[str]:
    points = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in zip(points, points[1:], strict=False)]


@given(letters, stops_of, st.lists(st.integers(0, 100), max_size=8), st.booleans())
def test_equals_slow_search_for_any_split(text, stops, cuts, include):
    matcher, emitted, matched, seen = StopMatcher(stops, include), "", None, ""
    longest = max(map(len, stops))
    for piece in pieces(text, cuts):
        match = matcher.push(piece)
        emitted, seen = emitted + match.text, seen + piece
        if match.stop is not None:
            matched = match.stop
            break
        assert seen.startswith(emitted) and len(seen) - len(emitted) <= longest - 1
    expected = slow_search(text, stops)
    if expected is None:
        assert matched is None and emitted + matcher.flush() == text
    else:
        end, stop = expected
        assert matched == stop
        assert emitted == text[: end if include else end - len(stop)]
    assert matcher.flush() == ""


@given(letters, letters, stops_of)
def test_unarmed_matches_are_ordinary_text(early, late, stops):
    """A stop string counts when its last character comes after the matcher is armed."""
    matcher = StopMatcher(stops, include=True)
    first = matcher.push(early, armed=False)
    second = matcher.push(late)
    ends = range(len(early) + 1, len(early) + len(late) + 1)
    hits = [end for end in ends if any((early + late)[:end].endswith(stop) for stop in stops)]
    assert first.stop is None
    assert (second.stop is not None) == bool(hits)
    assert first.text + second.text + matcher.flush() == (early + late)[: hits[0] if hits else None]


def test_withholds_only_what_may_still_match():
    matcher = StopMatcher(["DEFGHIJ"])
    assert matcher.push("ABC DEF").text == "ABC "
    assert matcher.push("X").text == "DEFX"


def test_of_matches_that_end_together_the_longest_is_cut():
    assert StopMatcher(["c", "abc", "bc"]).push("xabc").text == "x"


def test_the_match_that_completes_first_wins():
    match = StopMatcher(["abcd", "bc"]).push("abcd")
    assert (match.text, match.stop) == ("a", "bc")


@pytest.mark.parametrize("stops", [[], [""]])
def test_no_stop_strings_withhold_nothing(stops):
    assert StopMatcher(stops).push("any text").text == "any text"


def test_worst_case_does_linear_work():
    """`aaa…b` against `aaa…a`: a search that starts again for each character would take 10^9 comparisons."""
    matcher = StopMatcher(["a" * 255 + "c"])
    text = ("a" * 254 + "b") * 400
    assert matcher.push(text).text + matcher.flush() == text
