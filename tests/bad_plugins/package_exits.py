"""Ends the process that lists it."""

import sys

CAUGHT_BY = "test_it_loads"
NONET_API = "1.1"

sys.exit("this machine has no such device")
