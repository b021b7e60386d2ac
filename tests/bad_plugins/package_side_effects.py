"""Being listed, it starts a thread, takes over the log and writes a file."""

import logging
import threading
from pathlib import Path

from core.hookspecs import Component, hookimpl

CAUGHT_BY = "test_importing_it_changes_nothing_else"
NONET_API = "1.1"

logging.basicConfig(level=logging.DEBUG)
Path("bad-side-effects.log").write_text("imported\n")
threading.Thread(target=threading.Event().wait, args=(600,), name="watcher", daemon=True).start()


@hookimpl
def provide_schedulers():
    yield Component("bad_effects", "plugins.schedulers.fcfs:Fcfs", "first come, first served")
