"""The version of the plugin contract (`core.hookspecs`), and what each has added."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

API_VERSION = "1.4"
"""Version of this contract, major.minor.

1.0 had the hooks of the nine stages and of model, attention, quant, cache and executor. It was never released; 1.1 is to
be the first that is, and does not only add to it. A plugin that says 1.0 is loaded, and what it builds on our classes works
as it did; but:

- A scheduler of its own must add output with `Request.append_output`, and take a request that comes with output in `add`. The
  lists of a request are read only, so that no stage can spoil another's: writing to `output_token_ids` raises, saying this.
- A cache of its own whose `free` has no `discard` is called without it. After a request has failed, what it wrote may be
  wrong, and such a cache cannot forget it alone: nothing is taken from it as found until `reset` has emptied it.
- The event hooks `step_finished` and `request_finished` are gone (now observers), and so is `Component.api_version`
  (now NONET_API): a plugin with either is refused.

1.2 adds, and a plugin that says 1.1 runs as it did: new methods of a contract need not be there, and new fields of what a
plugin is given have defaults. Neither has been released yet, so two things could still change:

- `ScheduledRequest` is a `msgspec` struct: it is copied with `msgspec.structs.replace`, not with that of `dataclasses`.
- A `ModelBatch` may have its requests in another order than the plan; `request_ids` says which. Its `block_table` is memory that
  is written again a few steps later: who keeps a batch for longer copies it.

1.3 adds grammars: the config group, the word `grammar` of a sampler, and `jump_forward` of a scheduler.

1.4 adds what native code can do without: a quant method may take weights in the blocks of a GGUF file as they are, and steps that
take the largest logit of each row need write no logits. And a model can tell what its steps must at least move and compute.

What each added is in `SINCE`."""

SINCE: Mapping[str, str] = MappingProxyType(
    {
        "provide_tool_parsers": "1.1",
        "provide_logits_processors": "1.1",
        "provide_observers": "1.1",
        "Component.requires": "1.1",
        "Component.conflicts": "1.1",
        "Component.accepts": "1.1",
        "Component.params": "1.1",
        "Request.append_output": "1.1",
        "Scheduler.add of requests with output": "1.1",
        "KVCache.free(discard=)": "1.1",
        "provide_predictors": "1.2",
        "SchedulerContext.predictor": "1.2",
        "Request.deadline": "1.2",
        "EngineRequest.deadline": "1.2",
        "GenerateRequest.ttl": "1.2",
        "Load.queued_tokens and what else says how fast the queue moves": "1.2",
        "Request.group_tables": "1.2",
        "ModelBatch.group_block_tables": "1.2",
        "ModelBatch.group_slot_mappings": "1.2",
        "Decode.proposes": "1.2",
        "Prefill.step_finished": "1.2",
        "Prefill.largest_chunk": "1.2",
        "SchedulerContext.swap_cost": "1.2",
        "KVCache.peek": "1.2",
        "KVCache.slide": "1.2",
        "KVCache.num_needed": "1.2",
        "KVCache.num_missing": "1.2",
        "KVCache.swap_out": "1.2",
        "KVCache.swap_in": "1.2",
        "KVCache.num_swapped_tokens": "1.2",
        "KVCache.take_copies": "1.2",
        "KVCache.num_swap_blocks": "1.2",
        "KVCache.num_free_swap_blocks": "1.2",
        "KVCache.reset while requests run": "1.2",
        "CacheContext.num_swap_blocks": "1.2",
        "CacheContext.windows": "1.2",
        "CacheContext.max_step_tokens": "1.2",
        "Executor.allocate_swap": "1.2",
        "Executor.swap": "1.2",
        "Executor.measure_swap": "1.2",
        "Executor.windows": "1.2",
        "ExecutorContext.window_groups": "1.2",
        "Policy.rank": "1.2",
        "Policy.num_reserved": "1.2",
        "Policy.joined": "1.2",
        "Policy.started": "1.2",
        "provide_grammars": "1.3",
        "SamplingParams.grammar": "1.3",
        "SamplerContext.grammar": "1.3",
        "Verdicts with more ids than were drafted": "1.3",
        "ToolParser.grammar": "1.3",
        "GenerateRequest.grammar_param": "1.3",
        "ObserverContext.grammars": "1.3",
        "ToolParser.special_tokens": "1.3",
        "provide_reasoning_parsers": "1.3",
        "FrontHalf.reasoning_parser": "1.3",
        "SamplingParams.shown_token_ids": "1.3",
        "BlockQuantMethod": "1.4",
        "Model.own_threads": "1.4",
        "ArgmaxModel": "1.4",
        "ArgmaxSampler": "1.4",
        "RooflineModel": "1.4",
        "AheadModel": "1.4",
        "Executor.roofline": "1.4",
    }
)
"""What is newer than 1.0, and since when: hooks, fields of `Component`, and parts of what stages are given or must do."""
