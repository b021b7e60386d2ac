"""Whose fault it is that a simulation ended. It has no guards: the figures of a run in which a component failed mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from core.errors import NonetError, PluginError, Terminated, described, printable
from core.isolation.faults import Names


@contextmanager
def blaming(names: Names) -> Iterator[None]:
    """What a component raises comes out as a PluginError: one line that names it, the error and where that was raised.

    Its cause is what was raised. An error in whose traceback there is no component passes as it is: it is the simulator's own.
    """
    try:
        yield
    except (NonetError, Terminated, KeyboardInterrupt):
        raise
    except BaseException as error:  # a stranger's code may raise anything
        part = names.blame(error, "")
        if not part.group:
            raise
        place = printable(_place(error.__traceback__))
        raise PluginError(f"{part.who} ended the simulation: {described(error)} ({place})") from error


def _place(trace: TracebackType | None) -> str:
    """The innermost frame, as file:line in function."""
    if trace is None:
        return "raised in native code"
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"raised at {code.co_filename}:{trace.tb_lineno} in {code.co_name}"
