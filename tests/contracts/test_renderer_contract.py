"""The built-in renderers keep the contract of stage 2."""

from __future__ import annotations

from core.stages.text_renderer import Text, TokenIds
from core.testing.renderer import RendererContract
from core.testing.suites import words_of


class TestText(RendererContract):
    component = Text
    provides = words_of("renderer", "text")


class TestTokenIds(RendererContract):
    component = TokenIds
    provides = words_of("renderer", "token_ids")
