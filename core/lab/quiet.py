"""Nothing on stderr while something is measured that is meant to fail."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr


@contextmanager
def quiet() -> Iterator[None]:
    """Injected faults and dead exporters log as they should; progress bars are for people. Afterwards all is as before."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            yield
    finally:
        logging.disable(before)
