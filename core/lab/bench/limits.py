"""How far from what the machine can a run was: `core.model.roofline`, held against its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from core.model.roofline import Roofline
from core.outputs import StepStats


def limits(roofline: Roofline, steps: Sequence[StepStats], report: Mapping[str, Any]) -> dict[str, Any]:
    """Shares of what was measured of the machine; a step's time has all of it, what the framework takes included.

    `decode`: steps without a prompt, over the bandwidth. `prefill`: those with one, over the arithmetic. `steps`: the least time
    of all steps, each bound by the slower of the two, over the time that they took.
    """
    context = report["prompt_tokens"] / report["num_requests"] + report["output_tokens"] / report["num_requests"] / 2
    decodes = [step for step in steps if not step.num_prefill_tokens]
    prefills = [step for step in steps if step.num_prefill_tokens]
    read = sum(roofline.step_bytes(context * step.num_requests) for step in decodes)
    computed = sum(roofline.step_operations(step.num_scheduled_tokens, step.num_requests) for step in prefills)
    least = sum(
        roofline.least_s(step.num_scheduled_tokens, step.num_requests, context * step.num_requests) for step in steps
    )
    found: dict[str, Any] = {
        "decode": _rate(read, decodes, roofline.bytes_per_s),
        "prefill": _rate(computed, prefills, roofline.operations_per_s),
        "steps_share": least / (sum(step.total_s for step in steps) or 1.0),
        "machine_and_model": asdict(roofline),
    }
    return {**found, "text": text(found)}


def _rate(amount: float, steps: Sequence[StepStats], ceiling: float) -> dict[str, float]:
    """Nothing where no step was of this kind."""
    seconds = sum(step.total_s for step in steps)
    if not seconds:
        return {}
    return {"achieved_per_s": amount / seconds, "ceiling_per_s": ceiling, "share": amount / seconds / ceiling}


def text(found: Mapping[str, Any]) -> str:
    parts = []
    for kind, what, unit in (("decode", "memory bandwidth", "GB/s"), ("prefill", "arithmetic", "GFLOP/s")):
        if one := found[kind]:
            rates = f"{one['achieved_per_s'] / 1e9:.1f} {unit} of {one['ceiling_per_s'] / 1e9:.1f}"
            parts.append(f"{kind} {one['share']:.0%} of {what} ({rates})")
    parts.append(f"{found['steps_share']:.0%} of what all steps could be")
    return "\n".join([", ".join(parts), *_table(found["machine_and_model"]["operations"])])


def _table(operations: Sequence[Mapping[str, Any]]) -> list[str]:
    total = sum(one["seconds"] for one in operations) or 1.0
    return [
        f"{one['name']:<34}{one['seconds'] / total:>6.1%}{one['seconds'] / one['count'] * 1e6:>12,.1f} us each, "
        f"{one['waited_s'] / total:.1%} waiting"
        for one in operations
    ]
