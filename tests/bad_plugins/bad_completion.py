"""Completions that each break one promise of `core.stages.completion`."""

from __future__ import annotations

from dataclasses import replace

from core.stages.completion import Standard


class EndsTooSoon(Standard):
    """EOS is the end, also before min_tokens."""

    caught_by = "test_no_stop_before_min_tokens"

    def judge(self, output, sampled):
        verdicts = dict(super().judge(output, sampled))
        for name, verdict in verdicts.items():
            ends = [index for index, token_id in enumerate(verdict.token_ids) if token_id in self._eos]
            if ends:
                verdicts[name] = replace(verdict, token_ids=verdict.token_ids[: ends[0] + 1], finish_reason="stop")
        return verdicts


class KeepsWhatFollows(Standard):
    """Tokens after the end are kept where speculation brought several."""

    caught_by = "test_several_tokens_are_cut_after_the_first_end"

    def judge(self, output, sampled):
        verdicts = super().judge(output, sampled)
        return {name: replace(v, token_ids=sampled.token_ids.get(name, ())) for name, v in verdicts.items()}


class ForgetsLength(Standard):
    """A request may outgrow the context."""

    caught_by = "test_length_by_max_tokens_and_by_context"

    def __init__(self, settings, context):
        super().__init__(settings, replace(context, model=replace(context.model, max_model_len=1 << 30)))
