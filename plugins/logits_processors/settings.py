"""Settings of the built-in logits processors, and what a request may send to them. Torch-free: both are checked before."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

Breakers = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=64)], ...], Field(max_length=64)]
Multiplier = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Base = Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)]
Length = Annotated[int, Field(ge=1, le=1 << 20)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MinTokensSettings(_Frozen):
    pass


class DrySettings(_Frozen):
    """What counts where a request says nothing else."""

    always: bool = Field(default=False, description="for every request, not only for those that send parameters")
    multiplier: Multiplier = Field(default=0.8, description="logits taken off at `allowed_length`; 0: nothing")
    base: Base = Field(default=1.75, description="growth of the penalty with each token of the repetition")
    allowed_length: Length = Field(default=2, description="a repetition this long is penalised first")
    last_n: Length | None = Field(default=None, description="newest tokens that are searched; null: all")
    sequence_breakers: Breakers = Field(
        default=("\n", ":", '"', "*"), description="texts that a repetition does not reach across"
    )


class DryParams(_Frozen):
    """A request's own: `{"logits_processors": {"dry": {"multiplier": 0.8}}}`. What is left out is the operator's."""

    multiplier: Multiplier | None = None
    base: Base | None = None
    allowed_length: Length | None = None
    last_n: Length | None = None
    sequence_breakers: Breakers | None = None


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) else value  # key=123 on a command line is a number


class WatermarkSettings(_Frozen):
    always: bool = Field(default=False, description="for every request, not only for those that ask")
    gamma: float = Field(default=0.25, gt=0, lt=1, description="share of the vocabulary that is green")
    delta: float = Field(default=2.0, gt=0, le=100, description="what is added to the logits of green tokens")
    key: Annotated[SecretStr, BeforeValidator(_as_text)] = Field(
        default=SecretStr("nonet"), min_length=1, description="who knows it can detect and forge; the default is public"
    )
    context_width: int = Field(default=1, ge=1, le=8, description="tokens before a token that decide what is green")


class WatermarkParams(_Frozen):
    """A request asks with `{"logits_processors": {"watermark": {}}}`; strength and key are the operator's."""


Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Mass = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Bits = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]


class XtcSettings(_Frozen):
    """What counts where a request says nothing else; likewise below."""

    always: bool = Field(default=False, description="for every request, not only for those that send parameters")
    probability: Share = Field(default=0.5, description="of leaving tokens out, at each position; 0: never")
    threshold: Share = Field(default=0.1, description="how likely tokens must be; above 0.5 nothing changes")


class XtcParams(_Frozen):
    """A request's own. What is left out is the operator's; likewise below."""

    probability: Share | None = None
    threshold: Share | None = None


class TypicalSettings(_Frozen):
    always: bool = Field(default=False, description="for every request, not only for those that send parameters")
    mass: Mass = Field(default=0.9, description="how likely the tokens that stay are together; 1: all stay")


class TypicalParams(_Frozen):
    mass: Mass | None = None


class MirostatSettings(_Frozen):
    always: bool = Field(default=False, description="for every request, not only for those that send parameters")
    tau: Bits = Field(default=5.0, description="the surprise that is aimed at, in bits per token")
    eta: Share = Field(default=0.1, description="how far one token moves the bound; 0: it stays at twice `tau`")


class MirostatParams(_Frozen):
    tau: Bits | None = None
    eta: Share | None = None
