"""Settings of the grammar backends. Torch-free, and without the backends."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    max_whitespace: int = Field(
        default=40, ge=1, le=1024, description="characters of white space between tokens of JSON"
    )


class LLGuidanceSettings(_Frozen):
    """Bounds per request; a request whose output reaches one of them ends with an error."""

    max_items_in_row: int = Field(default=2000, ge=1, description="ways to go on with one lexeme")
    initial_lexer_fuel: int = Field(
        default=1_000_000, ge=1, description="work to build a lexer; about 50,000 a millisecond"
    )
    step_lexer_fuel: int = Field(
        default=200_000, ge=1, description="lexer work for one mask; about 14,000 a millisecond"
    )
    step_max_items: int = Field(
        default=50_000, ge=1, description="parser work for one mask; about 20,000 a millisecond"
    )
    max_lexer_states: int = Field(default=50_000, ge=1, description="of one output; 1 to 2 kB each")
    max_grammar_size: int = Field(default=500_000, ge=1, description="symbols of a grammar")


class XGrammarSettings(_Frozen):
    cache_memory: str = Field(
        default="64MiB", description="of masks that grammars have in common; the others go with theirs"
    )
