"""What `plugins new` must know of each group: its hook's words and what its components declare. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from core.hookspecs import CHAINS, GROUPS


@dataclass(frozen=True, slots=True)
class Kind:
    """One group. `declares` is what follows the summary in `Component(…)`, as source text."""

    group: str
    summary: str
    declares: tuple[str, ...] = ()
    contract: str = ""  # the suite's module in core.testing and its class
    words: tuple[str, ...] = ()  # what the test class says beside its component, as source text
    test_imports: tuple[str, ...] = ()


SETTINGS = 'settings="acme_word.settings:AcmeWordSettings"'

KINDS = {
    kind.group: kind
    for kind in (
        Kind("frontend", "lines on standard input, JSON on standard output", contract="frontend:FrontendContract"),
        Kind(
            "renderer",
            "chat template and tokenizer, with a default system message",
            ('provides=("messages", "text", "token_ids", "tools")',),
            "renderer:RendererContract",
        ),
        Kind("admission", "the usual checks, and a bound on prompts", contract="admission:AdmissionContract"),
        Kind(
            "scheduler",
            "short prompts first, and nobody waits for ever",
            ('provides=("drafts",)',),
            "scheduler:SchedulerContract",
        ),
        Kind("prefill", "each prompt gets a share of the step", contract="prefill:PrefillContract"),
        Kind(
            "decode",
            "drafts by prompt lookup",
            ('requires=("scheduler.drafts", "sampler.drafts")',),
            "decode:DecodeContract",
        ),
        Kind(
            "sampler",
            "argmax, or Gumbel noise",
            (SETTINGS, 'provides=("temperature", "logits_processors", "drafts")'),
            "sampler:SamplerContract",
            ('provides = frozenset({"temperature", "logits_processors", "drafts"})  # as in its Component',),
        ),
        Kind("detokenizer", "text word by word", contract="detokenizer:DetokenizerContract"),
        Kind("completion", "the usual ends, and a bound on every output", contract="completion:CompletionContract"),
        Kind("model", "the native decoder with scaled logits", (SETTINGS,), "model:ModelContract"),
        Kind(
            "attention",
            "one request at a time, easy to read",
            (SETTINGS, 'provides=("sliding_window", "softcap")'),
            "attention:AttentionContract",
        ),
        Kind(
            "quant",
            "int8 weights, one scale per output channel",
            (SETTINGS,),
            "quant:QuantContract",
            ("max_error = 0.02  # relative, of a product",),
        ),
        Kind(
            "cache",
            "paged blocks; short prompts share nothing",
            ('provides=("prefix_sharing",)',),
            "cache:CacheContract",
        ),
        Kind(
            "executor",
            "in the engine's process, slow steps logged",
            (SETTINGS, 'provides=("history", "state")'),
            "executor:ExecutorContract",
        ),
        Kind(
            "tool_parser",
            "calls are lines that begin with TOOL",
            ('provides=("tools",)', 'requires=("frontend.tools", "renderer.messages", "renderer.tools")'),
            "tool_parser:ToolParserContract",
            (
                'provides = frozenset({"tools"})  # as in its Component',
                """examples = {'TOOL {"name": "weather", "arguments": {"city": "Oslo"}}': [("weather", {"city": "Oslo"})]}""",
            ),
        ),
        Kind(
            "logits_processors",
            "no n-gram of the output occurs twice",
            (
                SETTINGS,
                'params="acme_word.settings:AcmeWordParams"',
                'requires=("sampler.logits_processors", "executor.history")',
            ),
            "logits_processor:LogitsProcessorContract",
            (
                "params = AcmeWordParams  # as in its Component",
                'asks = ({"size": 2}, {"size": 3})  # what requests send',
            ),
            ("from acme_word.settings import AcmeWordParams",),
        ),
        Kind("observers", "tokens of each tenant, in a JSON file", contract="observer:ObserverContract"),
    )
}

assert tuple(KINDS) == (*GROUPS, *CHAINS)
