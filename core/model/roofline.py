"""What a step must at least move and compute, over what the machine can. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OperationTime:
    """What one kind of operation took, over all steps so far."""

    name: str
    count: int
    seconds: float
    waited_s: float  # of these, for other threads


@dataclass(frozen=True, slots=True)
class Roofline:
    """Of one model on one machine (Williams, Waterman and Patterson, CACM 2009): a step takes no less than either time.

    An operation is one multiplication or one addition. Attention's own operations are left out: they are few beside those of the
    weights until a context is long, and its reads of the KV cache are counted.
    """

    weight_bytes: float  # that every step reads, whatever it computes; of a tied embedding once, as the head
    linear_operations_per_token: float  # of all layers
    head_operations_per_row: float  # of the logits of one token
    kv_bytes_per_context_token: float  # read for each token before a token that is computed; windows are taken as full
    bytes_per_s: float  # that all threads read together, measured
    operations_per_s: float  # of a large product in the model's arithmetic, measured
    operations: tuple[OperationTime, ...] = ()  # of a model that was asked to take its times

    def step_bytes(self, num_context_tokens: float) -> float:
        """`num_context_tokens`: over all requests of the step."""
        return self.weight_bytes + self.kv_bytes_per_context_token * num_context_tokens

    def step_operations(self, num_tokens: float, num_rows: float) -> float:
        """`num_rows`: tokens whose logits are computed."""
        return self.linear_operations_per_token * num_tokens + self.head_operations_per_row * num_rows

    def least_s(self, num_tokens: float, num_rows: float, num_context_tokens: float) -> float:
        """Seconds that such a step takes at least."""
        moving = self.step_bytes(num_context_tokens) / self.bytes_per_s
        return max(moving, self.step_operations(num_tokens, num_rows) / self.operations_per_s)
