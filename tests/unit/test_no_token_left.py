"""What a request's own parameters do not leave together is told to its client as a 400, and is nobody's failure."""

from __future__ import annotations

import pytest

from core.errors import NO_TOKEN_LEFT, GenerationError
from plugins.frontends.openai_http.errors import failure_of

WHO = "sampler=standard (plugin core.builtin, nonet 1.0)"
REASON = f"{NO_TOKEN_LEFT} at position 3: its grammar and bad_words allow none together"


@pytest.mark.parametrize("text", [REASON, f"{WHO}: {REASON}"])
def test_a_conflict_is_the_clients(text: str) -> None:
    failure = failure_of(GenerationError(text), "r1")
    assert (failure.status, failure.code, failure.type) == (400, "no_token_left", "invalid_request_error")
    assert (
        failure.message == "The request leaves no token at position 3: its grammar and bad_words allow none together."
    )


@pytest.mark.parametrize("text", [f"{WHO}: the model's logits hold NaN", f"{WHO}: it said: {REASON}"])
def test_anything_else_is_not(text: str) -> None:
    assert GenerationError(text).conflict is None
    assert failure_of(GenerationError(text), "r1").status == 500
