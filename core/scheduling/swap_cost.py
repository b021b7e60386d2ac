"""What it costs to keep a preempted request's KV, against what it costs to compute it again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwapCost:
    """Measured where the model lives, when the engine starts. Seconds."""

    copy_s_per_block: float  # one KV block over all layers, one way between device and host
    prefill_s_per_token: float

    def is_worth(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether moving `num_blocks` out and in again takes less than computing the `num_tokens` in them.

        An upper bound of what moving takes: a block whose content is in host memory already, or which the device still has when
        its request comes back, is not copied.
        """
        return 2 * num_blocks * self.copy_s_per_block < num_tokens * self.prefill_s_per_token
