from core.model.tokenizer import Tokenizer
from core.stages.detokenizer import Detokenizer, DetokenizerContext
from core.stages.incremental import Incremental
from core.testing.detokenizer import DetokenizerContract


class TestIncremental(DetokenizerContract):
    def make(self, tokenizer: Tokenizer) -> Detokenizer:
        return Incremental(Incremental.Settings(), DetokenizerContext(tokenizer))
