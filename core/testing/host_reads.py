"""A guard on what is to be graph-safe: nothing may read the values of tensors on the host."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

_HOST_READS = frozenset(
    {"item", "tolist", "nonzero", "argwhere", "unique", "masked_select", "equal", "allclose"}
    | {"__bool__", "__int__", "__float__", "__index__", "__contains__"}
)


class HostReads(TorchFunctionMode):
    """While it is on: names of the operations that read values of tensors on the host, which no captured graph can do."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _HOST_READS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))
