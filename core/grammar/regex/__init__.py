"""Regular expressions as trees, whoever compiles them: JSON schemas' patterns, and grammars of their own."""

from core.grammar.regex.dialects import COMMON, ECMA, Dialect
from core.grammar.regex.syntax import parse

__all__ = ["COMMON", "ECMA", "Dialect", "parse"]
