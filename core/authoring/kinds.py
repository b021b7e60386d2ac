"""What `plugins new` must know of each group: its hook's words and what its components declare. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from core.components import CHAINS, GROUPS


@dataclass(frozen=True, slots=True)
class Kind:
    """One group. `declares` is what follows the summary in `Component(…)`, as source text."""

    group: str
    summary: str
    declares: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # what the test class says beside its component, as source text
    test_imports: tuple[str, ...] = ()
    std_imports: tuple[str, ...] = ()  # of the test module, from the standard library
    beside: tuple[str, ...] = ()  # what else must be selected for it: overrides
    is_first: str = ""  # of a chain where the first that can is asked: what stays behind it


ASK = """settings = {"port": 0}

    async def ask(self, frontend: AcmeWord, prompt: str, max_tokens: int) -> str:
        \"\"\"How a client speaks to it: the text of one answer, or an exception.\"\"\"
        address = urlsplit(frontend.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode() + b"\\n")
            return str(json.loads(await reader.readline())["text"])
        finally:
            writer.close()"""
STD = ("import asyncio", "import json", "from urllib.parse import urlsplit", "")
SETTINGS = 'settings="acme_word.settings:AcmeWordSettings"'

KINDS = {
    kind.group: kind
    for kind in (
        Kind("frontend", "JSON lines over TCP", words=(ASK,), std_imports=STD),
        Kind(
            "renderer",
            "chat template and tokenizer, with a default system message",
            ('provides=("messages", "text", "token_ids", "tools")',),
        ),
        Kind("admission", "the usual checks, and a bound on prompts"),
        Kind(
            "scheduler",
            "short prompts first, and nobody waits for ever",
            ('provides=("drafts",)',),
        ),
        Kind("prefill", "each prompt gets a share of the step"),
        Kind(
            "decode",
            "drafts by prompt lookup",
            ('requires=("scheduler.drafts", "sampler.drafts")',),
        ),
        Kind(
            "sampler",
            "argmax, or Gumbel noise",
            (SETTINGS, 'provides=("temperature", "logits_processors", "drafts")'),
        ),
        Kind("detokenizer", "text word by word"),
        Kind("completion", "the usual ends, and a bound on every output"),
        Kind("model", "the native decoder with scaled logits", (SETTINGS,)),
        Kind(
            "attention",
            "one request at a time, easy to read",
            (SETTINGS, 'provides=("sliding_window", "softcap")'),
            beside=("model=native", "quant=none"),
        ),
        Kind(
            "quant",
            "int8 weights, one scale per output channel",
            (SETTINGS,),
            ("max_error = 0.02  # relative, of a product",),
            beside=("model=native", "attention=torch_sdpa"),
        ),
        Kind(
            "cache",
            "paged blocks; short prompts share nothing",
            ('provides=("prefix_sharing",)',),
        ),
        Kind(
            "executor",
            "in the engine's process, slow steps logged",
            (SETTINGS, 'provides=("history", "state")'),
        ),
        Kind(
            "tool_parser",
            "calls are lines that begin with TOOL",
            ('provides=("tools", "grammar")', 'requires=("frontend.tools", "renderer.messages", "renderer.tools")'),
            (
                """examples = {'TOOL {"name": "weather", "arguments": {"city": "Oslo"}}': [("weather", {"city": "Oslo"})]}""",
            ),
        ),
        Kind(
            "reasoning_parser",
            "reasoning is in brackets at the start",
            ('provides=("reasoning",)',),
            ("""examples = {"[how is it?]fine": ("how is it?", "fine")}""",),
        ),
        Kind(
            "predictor",
            "the mean of what the tenant's requests had",
            ('requires=("scheduler.predictor",)',),
            beside=("scheduler=srtf",),
        ),
        Kind(
            "grammars",
            "one of several texts",
            ('provides=("choice",)',),
            is_first="llguidance",
        ),
        Kind(
            "logits_processors",
            "no n-gram of the output occurs twice",
            (
                SETTINGS,
                'params="acme_word.settings:AcmeWordParams"',
                'requires=("sampler.logits_processors", "executor.history")',
            ),
            (
                "params = AcmeWordParams  # as in its Component",
                'asks = ({"size": 2}, {"size": 3})  # what requests send',
            ),
            ("from acme_word.settings import AcmeWordParams",),
        ),
        Kind("observers", "tokens of each tenant, in a JSON file"),
    )
}

assert tuple(KINDS) == (*GROUPS, *CHAINS)
