"""Waits, while it is listed, for what never comes."""

import threading

CAUGHT_BY = "test_it_loads"
NONET_API = "1.1"

threading.Event().wait()
