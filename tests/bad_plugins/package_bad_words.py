"""Requires something of no group."""

from core.hookspecs import Component, hookimpl

CAUGHT_BY = "test_it_loads"
NONET_API = "1.1"


@hookimpl
def provide_schedulers():
    yield Component("bad_words", "plugins.schedulers.fcfs:Fcfs", "first come, first served", requires=("drafts",))
