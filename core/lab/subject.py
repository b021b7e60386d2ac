"""A model that is checked, and a text in its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from core.assembly import read_model
from core.lab.perplexity import chunks_of
from core.model.spec import ModelSpec
from core.model.tokenizer import Tokenizer, load_tokenizer
from core.session import open_session


@dataclass(frozen=True)
class Subject:
    overrides: tuple[str, ...]  # that select the model
    text: str

    @cached_property
    def spec(self) -> ModelSpec:
        return read_model(open_session(self.overrides).settings)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.spec.files)

    @cached_property
    def ids(self) -> list[int]:
        return self.tokenizer.encode(self.text, add_special_tokens=False)

    @property
    def start(self) -> list[int]:
        """What every prompt of this model begins with."""
        bos = self.tokenizer.bos_token_id
        return [bos] if self.tokenizer.adds_bos and bos is not None else []

    def passages(self, num_passages: int, num_tokens: int) -> dict[str, list[int]]:
        """By name, spread over the text, each of so many tokens."""
        own = num_tokens - len(self.start)
        apart = (len(self.ids) - own) // num_passages
        if apart < 1:
            raise ValueError(f"the text has {len(self.ids)} tokens, too few for {num_passages} passages")
        return {f"p{n}": [*self.start, *self.ids[n * apart : n * apart + own]] for n in range(num_passages)}

    def chunks(self, num_tokens: int, size: int) -> list[list[int]]:
        """Of the text's first tokens; none is longer than the model reads with a token to follow."""
        return chunks_of(self.ids[:num_tokens], min(size, self.spec.max_model_len - 1), self.start)

    def with_model(self, overrides: Sequence[str]) -> Subject:
        return Subject(tuple(overrides), self.text)
