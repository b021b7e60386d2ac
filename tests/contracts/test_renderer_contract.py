from core.stages.renderer import Renderer, RendererContext
from core.stages.text_renderer import Text, TokenIds
from core.testing.renderer import RendererContract


class TestText(RendererContract):
    def make(self, context: RendererContext) -> Renderer:
        return Text(Text.Settings(), context)


class TestTokenIds(RendererContract):
    def make(self, context: RendererContext) -> Renderer:
        return TokenIds(TokenIds.Settings(), context)
