"""Sampling fields that `generate` and the terminal chat offer, with their bounds, and the SamplingParams they make."""

from __future__ import annotations

from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    RootModel,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from core.errors import RequestError
from core.request import RepetitionDetection, SamplingParams
from plugins.frontends.structured_outputs import Asked, StructuredOutputs, asked_for, wanted_by


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


class GrammarFields(RootModel[dict[str, Any]]):
    """`structured_outputs` as a client writes it, read once."""

    model_config = ConfigDict(frozen=True)
    _asked: Asked | None = PrivateAttr(None)

    @property
    def asked(self) -> Asked | None:
        return self._asked

    @model_validator(mode="after")
    def _read(self) -> Self:
        """Raises ValueError for what names no grammar, or two."""
        if self._asked is not None:  # pydantic asks again where a made one is handed on
            return self
        try:
            outputs = StructuredOutputs.model_validate(self.root)
            self._asked = asked_for(wanted_by(outputs), outputs)
        except RequestError as error:
            raise ValueError(error.message) from None
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)[0]
            path = ".".join(map(str, ("structured_outputs", *found["loc"])))
            raise ValueError(f"{path}: {found['msg']}") from None
        return self


class SamplingFields(BaseModel):
    """A client-side subset of `core.request.SamplingParams`, under the same names."""

    model_config = ConfigDict(frozen=True, extra="forbid")
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
    structured_outputs: GrammarFields | None = Field(
        default=None,
        description="what the text must be: {json: {type: object}}, {regex: '[0-9]+'}, {choice: [yes, no]} …",
    )
    logits_processors: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="what a request sends to logits processors, by name: {dry: {multiplier: 0.8}}"
    )

    def params(self) -> SamplingParams:
        values: dict[str, Any] = {name: getattr(self, name) for name in SamplingFields.model_fields}
        values["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        values.pop("max_tokens")  # admission resolves it from GenerateRequest.max_tokens
        values["extra"] = values.pop("logits_processors")
        values.pop("structured_outputs")
        values["grammar"] = self._asked.spec if self._asked is not None else None
        if self.repetition_detection is not None:
            values["repetition_detection"] = RepetitionDetection(**self.repetition_detection.model_dump())
        return SamplingParams(**values)

    @property
    def grammar_param(self) -> str:
        """Where the grammar came from, for error messages."""
        return self._asked.param if self._asked is not None else ""

    @property
    def _asked(self) -> Asked | None:
        return self.structured_outputs.asked if self.structured_outputs is not None else None
