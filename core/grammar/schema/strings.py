"""Sets of strings: lengths and languages. They are also the sets of names that a rule for properties is about."""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.grammar.schema import automata
from core.grammar.schema.ecma import language
from core.grammar.schema.formats import EXACT, FORMATS
from core.grammar.schema.languages import Language
from core.grammar.schema.tools import Tools
from core.stages.grammar import GrammarError


@dataclass(frozen=True, slots=True)
class String:
    """Lengths count code points."""

    low: int = 0
    high: int | None = None
    language: Language | None = None
    formats: frozenset[str] = frozenset()
    no_formats: frozenset[str] = frozenset()
    only: frozenset[str] | None = None  # the values, where they are few: then the other fields say nothing
    but: frozenset[str] = frozenset()  # none of these

    def accepts(self, value: str, tools: Tools) -> bool:
        if self.only is not None:
            return value in self.only
        if value in self.but or len(value) < self.low or (self.high is not None and len(value) > self.high):
            return False
        if self.language is not None and not tools.languages.matches(self.language, value):
            return False
        are = {name: tools.languages.matches(of_format(name, tools), value) for name in self.formats | self.no_formats}
        return all(are[name] for name in self.formats) and not any(are[name] for name in self.no_formats if exact(name))


ANY = String()


def intersection(a: String, b: String, tools: Tools) -> String | None:
    if a.only is not None or b.only is not None:
        listed, other = (a, b) if a.only is not None else (b, a)
        values = frozenset(value for value in listed.only or () if other.accepts(value, tools))
        return String(only=values) if values else None
    highs = [high for high in (a.high, b.high) if high is not None]
    languages = [one for one in (a.language, b.language) if one is not None]
    both = tools.languages.both(*languages) if languages else None
    found = String(
        low=max(a.low, b.low),
        high=min(highs, default=None),
        language=both,
        formats=a.formats | b.formats,
        no_formats=a.no_formats | b.no_formats,
        but=a.but | b.but,
    )
    return None if _is_empty(found, tools, len(languages) > 1) else found


def _is_empty(shape: String, tools: Tools, is_new: bool) -> bool:
    if shape.high is not None and shape.low > shape.high:
        return True
    if not shape.formats.isdisjoint(shape.no_formats):
        return True
    if shape.language is None:
        return False
    return shape.language is tools.languages.none or (
        is_new and automata.is_empty(tools.languages, shape.language, tools.limits)
    )


def has_text(shape: String, tools: Tools) -> bool:
    """Of a shape without holes; True also where it would take too long to find out."""
    if shape.language is None or not (shape.low or shape.high is not None):
        return shape.language is not tools.languages.none
    return automata.has_length(tools.languages, shape.language, shape.low, shape.high, tools.limits)


def complement(shape: String, tools: Tools) -> tuple[String, ...]:
    if shape.only is not None:
        return (String(but=shape.only),)
    found = [String(only=shape.but)] if shape.but else []
    if shape.low:
        found.append(String(high=shape.low - 1))
    if shape.high is not None:
        found.append(String(low=shape.high + 1))
    if shape.language is not None:
        found.append(String(language=tools.languages.complement(shape.language)))
    found += [String(no_formats=frozenset((name,))) for name in sorted(shape.formats)]
    return (*found, *(String(formats=frozenset((name,))) for name in sorted(shape.no_formats)))


def exact(name: str) -> bool:
    """Whether the pattern of a format is all of it; raises GrammarError where it is not, and what is outside is asked for."""
    if name not in EXACT:
        raise GrammarError(f"what is not of the format {name} is not supported")
    return True


def of_format(name: str, tools: Tools) -> Language:
    return language(tools.languages, FORMATS[name])


def as_language(shape: String, tools: Tools) -> Language:
    """All of it as one language."""
    made = tools.languages
    if shape.only is not None:
        return made.texts(sorted(shape.only))
    parts = [shape.language] if shape.language is not None else []
    if shape.low or shape.high is not None:
        parts.append(made.loop(made.any_char, shape.low, shape.high))
    if shape.but:
        parts.append(made.complement(made.texts(sorted(shape.but))))
    parts += [of_format(name, tools) for name in sorted(shape.formats)]
    parts += [made.complement(of_format(name, tools)) for name in sorted(shape.no_formats) if exact(name)]
    return made.both(*parts)


def without_holes(shape: String, tools: Tools) -> String:
    """The same strings with formats and `but` in the language."""
    holes = [value for value in shape.but if replace(shape, but=frozenset()).accepts(value, tools)]
    said = String(formats=shape.formats, no_formats=shape.no_formats, but=frozenset(holes))
    parts = [as_language(said, tools)] if said != ANY else []
    parts += [shape.language] if shape.language is not None else []
    return String(shape.low, shape.high, tools.languages.both(*parts) if parts else None)
