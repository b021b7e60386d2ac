"""What one render of a chat template may still use: CPU time and characters."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from jinja2.exceptions import TemplateRuntimeError

_STEPS_PER_CLOCK = 64  # one operation on up to 4096 characters is one step
_CHARS_PER_STEP = 4096


class TemplateLimitError(TemplateRuntimeError):
    """A template went over its budget of time or size."""


class Budget(threading.local):
    """What one render may still use. One per thread: renders run side by side on one compiled template.

    Time is CPU time of the rendering thread, so a busy machine does not fail an honest template.
    """

    def __init__(self, cpu_seconds: float, max_chars: int) -> None:
        self._cpu_seconds = cpu_seconds
        self.max_chars = max_chars
        self.start()

    def start(self) -> None:
        """Give this thread a whole budget again and forget the values of the last render."""
        self._deadline = time.thread_time() + self._cpu_seconds
        self._steps = _STEPS_PER_CLOCK
        self._emitted = 0
        self._sizes: dict[int, tuple[object, int]] = {}  # id -> (the object, kept so that its id stays its own; size)

    def spend(self, chars: int = 0) -> None:
        """One operation that handles `chars` characters."""
        self._steps -= 1 + chars // _CHARS_PER_STEP
        if self._steps <= 0:
            self._steps = _STEPS_PER_CLOCK
            if time.thread_time() > self._deadline:
                raise TemplateLimitError(f"the chat template ran longer than {self._cpu_seconds} s of CPU time")

    def allow(self, chars: int) -> None:
        """Raise before something of this size is made."""
        self.spend(min(chars, self.max_chars))
        if chars > self.max_chars:
            raise TemplateLimitError(f"the chat template makes more than {self.max_chars} characters")

    def emit(self, chars: int) -> None:
        """Output counts wherever it goes: into the text, a macro's result, a `set` block."""
        self._emitted += chars
        self.allow(self._emitted)

    def checked(self, value: Any) -> Any:
        self.allow(self.size(value))
        return value

    def size(self, value: Any) -> int:
        """Characters and items of a value, counted with repeats. Values never change in the sandbox: sizes are kept."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, (list, tuple, dict)):
            return 1
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        parts: Iterable[Any] = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        size = 1 + sum(1 + self.size(part) for part in parts)
        self._sizes[id(value)] = (value, size)
        return size
