"""What each config group promises, and the suite that checks it: one table. Imports no torch.

The docstring of each hook names the same contract, which a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from core.components import CHAINS, GROUPS


@dataclass(frozen=True, slots=True)
class Promise:
    """Both as "package.module:Class"."""

    protocol: str
    suite: str


CONTRACTS: Mapping[str, Promise] = MappingProxyType(
    {
        "frontend": Promise("core.stages.frontend:Frontend", "core.testing.frontend:FrontendContract"),
        "renderer": Promise("core.stages.renderer:Renderer", "core.testing.renderer:RendererContract"),
        "admission": Promise("core.stages.admission:Admission", "core.testing.admission:AdmissionContract"),
        "scheduler": Promise("core.stages.scheduler:Scheduler", "core.testing.scheduler:SchedulerContract"),
        "prefill": Promise("core.stages.prefill:Prefill", "core.testing.prefill:PrefillContract"),
        "decode": Promise("core.stages.decode:Decode", "core.testing.decode:DecodeContract"),
        "sampler": Promise("core.stages.sampler:Sampler", "core.testing.sampler:SamplerContract"),
        "detokenizer": Promise("core.stages.detokenizer:Detokenizer", "core.testing.detokenizer:DetokenizerContract"),
        "completion": Promise("core.stages.completion:Completion", "core.testing.completion:CompletionContract"),
        "model": Promise("core.model.interface:Model", "core.testing.model:ModelContract"),
        "attention": Promise("core.model.interface:AttentionBackend", "core.testing.attention:AttentionContract"),
        "quant": Promise("core.model.interface:QuantMethod", "core.testing.quant:QuantContract"),
        "cache": Promise("core.cache.kv_cache:KVCache", "core.testing.cache:CacheContract"),
        "executor": Promise("core.model.interface:Executor", "core.testing.executor:ExecutorContract"),
        "tool_parser": Promise("core.stages.tool_parser:ToolParser", "core.testing.tool_parser:ToolParserContract"),
        "reasoning_parser": Promise(
            "core.stages.reasoning_parser:ReasoningParser", "core.testing.reasoning_parser:ReasoningParserContract"
        ),
        "predictor": Promise("core.stages.predictor:Predictor", "core.testing.predictor:PredictorContract"),
        "grammars": Promise("core.stages.grammar:GrammarBackend", "core.testing.grammar:GrammarContract"),
        "logits_processors": Promise(
            "core.stages.logits_processor:LogitsProcessor", "core.testing.logits_processor:LogitsProcessorContract"
        ),
        "observers": Promise("core.observers:Observer", "core.testing.observer:ObserverContract"),
    }
)
"""Config group -> the Protocol of its components, and their suite."""

assert tuple(CONTRACTS) == (*GROUPS, *CHAINS)
