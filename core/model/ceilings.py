"""What a device can: bytes that it reads, and products that it computes. Each takes about a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from core.memory import free_host_memory
from core.model.arch import Architecture
from core.model.roofline import Roofline

READ_BYTES = 2**30  # past every cache
SIDE = 2048  # of the square matrices of a product
ROUNDS = 5  # the best counts: what else the machine does only ever adds


def roofline_of(arch: Architecture, dtype: torch.dtype, device: torch.device) -> Roofline:
    """Of the torch layers, whose weights are all in `dtype`."""
    layers = layer_weights(arch)
    head = arch.vocab_size * arch.hidden_size
    kv = sum(2 * plan.attention.num_kv_heads * plan.attention.head_dim for plan in arch.layers)
    with torch.inference_mode():
        return Roofline(
            weight_bytes=(layers + head) * dtype.itemsize,
            linear_operations_per_token=2 * layers,
            head_operations_per_row=2 * head,
            kv_bytes_per_context_token=kv * dtype.itemsize,
            bytes_per_s=read_rate(device),
            operations_per_s=product_rate(dtype, device),
        )


def layer_weights(arch: Architecture) -> int:
    """Numbers in the matrices of all layers."""
    total = 0
    for plan in arch.layers:
        spec = plan.attention
        attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        total += arch.hidden_size * (attention + 3 * plan.intermediate_size)
    return total


def read_rate(device: torch.device) -> float:
    """Bytes per second."""
    numbers = torch.ones(readable_bytes(device) // 4, dtype=torch.float32, device=device)
    return numbers.nbytes / best_s(lambda: numbers.sum(), device)


def readable_bytes(device: torch.device) -> int:
    """As many as are wanted, or a quarter of what is free."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()
    return READ_BYTES if free is None else max(min(READ_BYTES, free // 4), 4)


def product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second."""
    left = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    right = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    return float(2 * SIDE**3 / best_s(lambda: left @ right, device))


def best_s(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Seconds; once more, to warm up."""
    found = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
    return min(found[1:])
