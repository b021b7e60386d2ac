"""Built-in logits processors."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl

NONET_API = API_VERSION


@hookimpl
def provide_logits_processors() -> Iterable[Component]:
    # Selected by default, so it does not require a sampler that runs processors: with another one, a request that sets
    # min_tokens is refused by name.
    yield Component(
        "min_tokens",
        "plugins.logits_processors.min_tokens:MinTokens",
        "no end of sequence before min_tokens tokens",
        settings="plugins.logits_processors.settings:MinTokensSettings",
        provides=("min_tokens",),
    )
    yield Component(
        "dry",
        "plugins.logits_processors.dry:Dry",
        "penalty on tokens that would go on with a repetition, growing with its length",
        settings="plugins.logits_processors.settings:DrySettings",
        params="plugins.logits_processors.settings:DryParams",
        requires=("sampler.logits_processors", "executor.history", "executor.state", "model.tokenizer"),
    )
    yield Component(
        "watermark",
        "plugins.logits_processors.watermark:Watermark",
        "soft green list: text whose origin can be told by who knows the key",
        settings="plugins.logits_processors.settings:WatermarkSettings",
        params="plugins.logits_processors.settings:WatermarkParams",
        requires=("sampler.logits_processors", "executor.history"),
    )
    yield Component(
        "xtc",
        "plugins.logits_processors.xtc:Xtc",
        "now and then the likeliest tokens are left out",
        settings="plugins.logits_processors.settings:XtcSettings",
        params="plugins.logits_processors.settings:XtcParams",
        requires=("sampler.logits_processors",),
    )
    yield Component(
        "typical",
        "plugins.logits_processors.typical:Typical",
        "only tokens about as surprising as is to be expected",
        settings="plugins.logits_processors.settings:TypicalSettings",
        params="plugins.logits_processors.settings:TypicalParams",
        requires=("sampler.logits_processors",),
    )
    yield Component(
        "mirostat",
        "plugins.logits_processors.mirostat:Mirostat",
        "the surprise of tokens is held at a target",
        settings="plugins.logits_processors.settings:MirostatSettings",
        params="plugins.logits_processors.settings:MirostatParams",
        requires=("sampler.logits_processors", "executor.history", "executor.state"),
    )
