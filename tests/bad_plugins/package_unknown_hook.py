"""A hook that does not exist is called by nobody."""

from core.hookspecs import Component, hookimpl

CAUGHT_BY = "test_it_loads"
NONET_API = "1.1"


@hookimpl
def provide_scheduler():
    yield Component("bad_hook", "plugins.schedulers.fcfs:Fcfs", "first come, first served")
