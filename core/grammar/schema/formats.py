"""Formats as patterns, each for texts of the format alone, though not for all of them where a pattern could not say that.

Sources: RFC 3339 (dates and times), RFC 3339 appendix A (durations), RFC 5321 and 1123 (mail, host names), RFC 2673 and 4291
(addresses), RFC 4122 (UUIDs), RFC 3986 (URIs), RFC 6901 (JSON pointers). Formats that are not here are annotations.
"""

from __future__ import annotations

_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_OFFSET = "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?{_OFFSET}|23:59:60(?:\.[0-9]+)?(?:[Zz]|[+-]00:00)"
_IN_A_DAY = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_IN_YEARS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
# No label with "--": in the third and fourth place it marks names of another kind (xn--…), whose rules no pattern has. Lengths
# are such that labels stay within 63 characters and names within 253.
_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9]){0,20}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,5}}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX = "[0-9A-Fa-f]{1,4}"
_LAST = f"(?:{_HEX}:{_HEX}|{_IPV4})"
_IPV6 = "|".join(
    [
        f"(?:{_HEX}:){{6}}{_LAST}",
        f"::(?:{_HEX}:){{5}}{_LAST}",
        f"(?:{_HEX})?::(?:{_HEX}:){{4}}{_LAST}",
        *(f"(?:(?:{_HEX}:){{0,{n}}}{_HEX})?::(?:{_HEX}:){{{3 - n}}}{_LAST}" for n in (1, 2, 3)),
        f"(?:(?:{_HEX}:){{0,4}}{_HEX})?::{_LAST}",
        f"(?:(?:{_HEX}:){{0,5}}{_HEX})?::{_HEX}",
        f"(?:(?:{_HEX}:){{0,6}}{_HEX})?::",
    ]
)
_WORD = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_UNRESERVED = r"A-Za-z0-9._~!$&'()*+,;=\-"
_PERCENT = "%[0-9A-Fa-f]{2}"
_PATH_LETTER = f"(?:[{_UNRESERVED}:@]|{_PERCENT})"
_AUTHORITY = f"(?:(?:[{_UNRESERVED}:]|{_PERCENT})*@)?(?:[{_UNRESERVED}]|{_PERCENT})*(?::[0-9]*)?"
_TAIL = rf"(?:\?(?:{_PATH_LETTER}|[/?])*)?(?:#(?:{_PATH_LETTER}|[/?])*)?"
_AFTER_SCHEME = f"(?://{_AUTHORITY}(?:/{_PATH_LETTER}*)*|/(?:{_PATH_LETTER}+(?:/{_PATH_LETTER}*)*)?|{_PATH_LETTER}+(?:/{_PATH_LETTER}*)*)?"
_FIRST = f"(?:[{_UNRESERVED}@]|{_PERCENT})+"
_RELATIVE = (
    f"(?://{_AUTHORITY}(?:/{_PATH_LETTER}*)*|/(?:{_PATH_LETTER}+(?:/{_PATH_LETTER}*)*)?|{_FIRST}(?:/{_PATH_LETTER}*)*)?"
)
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:{_AFTER_SCHEME}{_TAIL}"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"

FORMATS = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}[Tt](?:{_TIME})",
        "duration": f"P(?:{_IN_YEARS}(?:{_IN_A_DAY})?|{_IN_A_DAY}|[0-9]+W)",
        "email": rf"{_WORD}(?:\.{_WORD})*@{_HOST}",
        "hostname": _HOST,
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uuid": "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
        "uri": _URI,
        "uri-reference": f"(?:{_URI}|{_RELATIVE}{_TAIL})",
        "json-pointer": _POINTER,
        "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    }.items()
}

EXACT = frozenset(("date", "duration", "ipv4", "ipv6", "uuid", "json-pointer", "relative-json-pointer"))
"""Of these the pattern has all texts."""

WITHOUT_PATTERN = frozenset(("idn-email", "idn-hostname", "iri", "iri-reference", "regex", "uri-template"))
"""Formats of the standard that no pattern here is for."""
