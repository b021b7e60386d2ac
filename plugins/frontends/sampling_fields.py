"""Sampling fields that `generate` and the terminal chat offer, with their bounds, and the SamplingParams they make."""

from __future__ import annotations

from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from core.request import RepetitionDetection, SamplingParams
from plugins.frontends.openai_http.parse import validate
from plugins.frontends.openai_http.response_format import AsksForGrammar, backend_param_of, grammar_of
from plugins.frontends.structured_outputs import Asked, Backend, GrammarText, StructuredOutputs


class Repetition(BaseModel):
    """As `core.request.RepetitionDetection`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    max_pattern_size: int = Field(ge=1, le=1024)
    min_pattern_size: int = Field(default=1, ge=1, le=1024)
    min_count: int = Field(default=3, ge=2, le=1024)

    @field_validator("min_pattern_size")
    @classmethod
    def _not_larger(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("max_pattern_size", value):
            raise ValueError("is larger than max_pattern_size")
        return value


class GrammarFields(BaseModel):
    """The fields of `plugins.frontends.openai_http.schema.Structured` that say what a text must be, read once."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    response_format: dict[str, Any] | None = Field(default=None, description="as over HTTP: {type: json_object} …")
    structured_outputs: dict[str, Any] | None = Field(
        default=None,
        description="what the text must be: {json: {type: object}}, {regex: '[0-9]+'}, {choice: [yes, no]} …",
    )
    guided_json: dict[str, Any] | str | None = Field(default=None, description="a JSON schema")
    guided_regex: GrammarText | None = None
    guided_choice: tuple[GrammarText, ...] | None = Field(default=None, min_length=1)
    guided_grammar: GrammarText | None = Field(default=None, description="EBNF: root ::= …")
    guided_decoding_backend: Backend | None = None
    _asked: Asked | None = PrivateAttr(None)
    _backend_param: str = PrivateAttr("")

    @model_validator(mode="after")
    def _read(self) -> Self:
        """Raises RequestError for what names no grammar, or two: pydantic lets it through, and it names the field."""
        options = None if self.structured_outputs is None else _outputs(self.structured_outputs)
        written = {name: getattr(self, name) for name in GrammarFields.model_fields}
        asking = AsksForGrammar(**{**written, "structured_outputs": options})
        self._asked, self._backend_param = grammar_of(asking), backend_param_of(asking)
        return self

    def with_grammar_of(self, other: GrammarFields) -> Self:
        """This one, made without a grammar, with that of `other`, which is not read again."""
        self._asked, self._backend_param = other._asked, other._backend_param
        return self

    @property
    def grammar_param(self) -> str:
        """Where the grammar came from, for error messages."""
        return self._asked.param if self._asked is not None else ""

    @property
    def grammar_backend_param(self) -> str:
        """And its backend."""
        return self._backend_param


def _outputs(value: dict[str, Any]) -> StructuredOutputs:
    """Raises RequestError."""
    return validate(StructuredOutputs, value, prefix="structured_outputs")


class SamplingFields(GrammarFields):
    """A client-side subset of `core.request.SamplingParams`, under the same names."""

    max_tokens: int | None = Field(default=None, ge=1, description="null: what is left of the context")
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=10)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    seed: int | None = None
    n: int = Field(default=1, ge=1, le=16)
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = Field(default=None, ge=0, le=20)
    logit_bias: dict[int, float] = Field(default_factory=dict, description="by token id, from -100 to 100")
    allowed_token_ids: tuple[int, ...] | None = Field(default=None, min_length=1)
    bad_words: tuple[str, ...] = ()
    repetition_detection: Repetition | None = None
    logits_processors: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="what a request sends to logits processors, by name: {dry: {multiplier: 0.8}}"
    )

    def params(self) -> SamplingParams:
        names = SamplingFields.model_fields.keys() - GrammarFields.model_fields.keys()
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        values["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        values.pop("max_tokens")  # admission resolves it from GenerateRequest.max_tokens
        values["extra"] = values.pop("logits_processors")
        values["grammar"] = self._asked.spec if self._asked is not None else None
        if self.repetition_detection is not None:
            values["repetition_detection"] = RepetitionDetection(**self.repetition_detection.model_dump())
        return SamplingParams(**values)
