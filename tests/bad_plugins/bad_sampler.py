"""Samplers that each break one promise of `core.stages.sampler`."""

from __future__ import annotations

from dataclasses import replace

from core.stages.logits_processor import NoProcessors
from plugins.samplers.standard import Standard

provides = (
    "allowed_token_ids", "bad_words", "frequency_penalty", "logit_bias", "logprobs", "min_p", "presence_penalty",
    "prompt_logprobs", "repetition_penalty", "temperature", "top_k", "top_p", "drafts", "logits_processors",
)  # fmt: skip


class IgnoresSeed(Standard):
    """Every request draws from one stream."""

    caught_by = "test_draws_follow_seed_choice_and_position"

    def sample(self, logits, metadata):
        rows = tuple(replace(row, seed=0) for row in metadata.rows)
        return super().sample(logits, replace(metadata, rows=rows))


class NearlyGreedy(Standard):
    """Finds the best of rounded logits."""

    caught_by = "test_greedy_is_argmax"

    def sample(self, logits, metadata):
        return super().sample(logits.round(), metadata)


class RaisesOnNaN(Standard):
    """One bad row is everybody's error."""

    caught_by = "test_a_bad_row_fails_its_request_alone"

    def sample(self, logits, metadata):
        if bool(logits.isnan().any()):
            raise ValueError("NaN in the logits")
        return super().sample(logits, metadata)


class DependsOnBatch(Standard):
    """Rows are centred by the mean of the batch."""

    caught_by = "test_a_row_does_not_depend_on_its_batch"

    def sample(self, logits, metadata):
        return super().sample(logits - logits.mean(dim=0), metadata)


class EditsPromptRows(Standard):
    """A ban meant for the sampled rows is written to all of them, before the prompt's log-probabilities are taken."""

    caught_by = "test_prompt_logprobs"

    def sample(self, logits, metadata):
        logits[:, 40:50] = -30.0
        return super().sample(logits, metadata)


class WritesHistory(Standard):
    """Appends what it drew to the request's own list."""

    caught_by = "test_rows_are_left_as_they_are"

    def sample(self, logits, metadata):
        found = super().sample(logits, metadata)
        for row in metadata.rows:
            row.output_token_ids.extend(found.token_ids.get(row.request_id, ()))
        return found


class SamplesPadding(Standard):
    """Ids that are padding of the vocabulary can be drawn."""

    caught_by = "test_unusable_ids_are_never_sampled"

    def __init__(self, settings, context):
        super().__init__(settings, replace(context, model=replace(context.model, unusable_token_ids=frozenset())))


class SkipsProcessors(Standard):
    """Says that it runs logits processors, and does not."""

    caught_by = "test_processors_edit_their_rows_before_the_draw"

    def __init__(self, settings, context):
        super().__init__(settings, replace(context, processors=NoProcessors()))
