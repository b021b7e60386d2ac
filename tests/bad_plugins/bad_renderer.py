"""Renderers that each break one promise of `core.stages.renderer`."""

from __future__ import annotations

import time
from dataclasses import replace

from core.stages.renderer import ChatPrompt
from core.stages.text_renderer import Text

provides = ("messages", "text", "token_ids", "tools")


class ChangesMessages(Text):
    """Cleans the client's messages in place."""

    caught_by = "test_messages_are_left_as_they_are"

    def render(self, prompt):
        if isinstance(prompt, ChatPrompt):
            for message in prompt.messages:
                message["content"] = message["content"].upper()
        return super().render(prompt)


class NotForThreads(Text):
    """Keeps the prompt in the object while it works on it."""

    caught_by = "test_threads_that_render_at_once_do_not_mix"

    def render(self, prompt):
        self.prompt = prompt
        time.sleep(0)
        return super().render(self.prompt)


class TakesAnyId(Text):
    """Token ids past the vocabulary go on to the model."""

    caught_by = "test_first_id_past_the_vocabulary_is_refused"

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self._model = replace(self._model, vocab_size=1 << 30)
