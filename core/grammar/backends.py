"""The backends of the process that compiles, made of the same settings and plugins as the front's."""

from __future__ import annotations

from functools import cache, partial

from core.assembly import build, chain_parts, read_model
from core.grammar.compilation import BackendPlan, GrammarBackends
from core.grammar.vocabulary import read_vocabulary
from core.model.describe import ANY_MODEL_TYPE
from core.model.tokenizer import load_tokenizer
from core.plugins import load_plugins
from core.progress import no_progress
from core.settings import Settings
from core.stages.grammar import GROUP, GrammarContext, Vocabulary


def backends_from_json(settings_json: str) -> GrammarBackends:
    """None of them is built yet. Raises ConfigError, PluginError, ModelFileError."""
    settings = Settings.from_json(settings_json)
    plugins = load_plugins(settings.plugins.disable, start_timeout=settings.plugins.start_timeout)
    plugins.check_start(settings.plugins.on_failure)
    spec = read_model(settings, no_progress, ANY_MODEL_TYPE)

    @cache
    def vocabulary() -> Vocabulary:
        return read_vocabulary(spec, load_tokenizer(spec.files))

    context = GrammarContext(vocabulary)
    plans = {
        part.provided.component.name: BackendPlan(partial(build, part, context), part.provided.component.provides)
        for part in chain_parts(settings, plugins, GROUP)
    }
    return GrammarBackends(plans, spec.vocab_size, plugins.fingerprint())
