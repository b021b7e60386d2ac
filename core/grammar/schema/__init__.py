"""JSON schemas made simple before a grammar is compiled from them (R7.3)."""

from core.grammar.schema.limits import Limits
from core.grammar.schema.normalise import normalise

__all__ = ["Limits", "normalise"]
