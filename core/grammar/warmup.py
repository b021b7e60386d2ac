"""A backend made ready where the sampler runs, soon after the start."""

from __future__ import annotations

import logging
import threading
from collections.abc import Container

from core.errors import described
from core.grammar.samples import sample
from core.stages.grammar import GrammarBackend

log = logging.getLogger("nonet.grammars")

DELAY_S = 3.0  # the server answers by then


class Warmup:
    """What a backend makes of the vocabulary for its first grammar (half a second for 50,000 tokens) would hold up the tokens of
    everybody who is running then; so it is made beside the steps."""

    def __init__(self, backend: GrammarBackend, kinds: Container[str], delay_s: float = DELAY_S):
        self._timer = threading.Timer(delay_s, _use, (backend, kinds))
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()


def _use(backend: GrammarBackend, kinds: Container[str]) -> None:
    try:
        backend.load(backend.compile(sample(kinds))).matcher()
    except BaseException as error:  # told when it is asked
        log.debug("a grammar backend cannot be made ready: %s", described(error))
