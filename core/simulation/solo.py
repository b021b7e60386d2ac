"""How long each request would take alone on the idle machine: what its slowdown is measured against."""

from __future__ import annotations

import numpy as np

from core.request import SamplingParams
from core.simulation.build import SimulatedRequest, Simulation
from core.simulation.cost import StepClock, Work
from core.simulation.records import Floats, Ints, Outcomes


def solo_seconds(simulation: Simulation, outcomes: Outcomes) -> Floats:
    """Per request, from arrival to end, with nothing cached; the prompt in the chunks that stage 5 makes of it. NaN where it
    was not served: it may be one that no machine could."""
    served = outcomes.served
    found = np.full(len(outcomes), np.nan)
    found[served] = _seconds(simulation, outcomes.num_prompt_tokens[served], outcomes.num_output_tokens[served])
    return found


def _seconds(simulation: Simulation, num_prompt: Ints, num_output: Ints) -> Floats:
    lengths, rows = np.unique(num_prompt, return_inverse=True)
    prompts: Floats = np.array([_prompt_s(simulation, int(length)) for length in lengths])
    seconds, steps = simulation.cost.seconds, np.maximum(num_output - 1, 0)
    context = steps * (num_prompt + 1) + steps * (steps - 1) // 2
    each = StepClock(seconds).decodes(1, 0)
    found: Floats = prompts[rows] + steps * each + seconds.decode_context * context
    return found


def _prompt_s(simulation: Simulation, length: int) -> float:
    """Where stage 5 gives no tokens, it would be asked again: then the prompt takes all that a step holds."""
    budget, clock = simulation.max_num_scheduled_tokens, StepClock(simulation.cost.seconds)
    request = SimulatedRequest(f"solo-{length}", simulation.prompt(length), SamplingParams())
    total = 0.0
    while (start := request.num_computed_tokens) < length:
        most = min(length - start, budget)
        count = simulation.prefill.num_tokens(request, length - start, budget)
        count = min(count, most) if count > 0 else most
        work = Work()
        work.add_chunk(start, count)
        total += clock.of(work)
        request.num_computed_tokens = start + count
    return total
