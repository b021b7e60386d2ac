"""Detokenizers that each break one promise of `core.stages.detokenizer`."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from core.stages.incremental import Incremental


class HalfCharacters(Incremental):
    """Decodes each token by itself, wherever a character is cut."""

    caught_by = "test_no_replacement_character_for_text_that_completes"

    def push(self, deltas):
        texts = super().push(deltas)
        return [replace(text, text=self._tokenizer.decode(list(text.token_ids))) for text in texts]


class LeaksStop(Incremental):
    """Looks for stop strings in one delta at a time: what of them came before has gone out."""

    caught_by = "test_nothing_of_a_stop_string_is_delivered_whatever_the_split"

    def start(self, request):
        self._stops = request.params.stop
        super().start(msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, stop=())))

    def push(self, deltas):
        texts = super().push(deltas)
        for index, text in enumerate(texts):
            found = [stop for stop in self._stops if stop in text.text]
            if found:
                kept = text.text[: text.text.index(found[0])]
                texts[index] = replace(text, text=kept, finish_reason="stop", stop_reason=found[0], stop_matched=True)
                self.drop([text.request_id])
        return texts


class TidiesDeltas(Incremental):
    """Takes white space off the ends of each delta, so that text depends on how it was cut."""

    caught_by = "test_joined_text_equals_decode_for_any_ids_and_split"

    def push(self, deltas):
        return [replace(text, text=text.text.rstrip()) for text in super().push(deltas)]
