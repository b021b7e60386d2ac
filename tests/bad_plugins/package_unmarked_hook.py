"""A hook without its mark is called by nobody either."""

from core.hookspecs import Component, hookimpl

CAUGHT_BY = "test_every_hook_is_called"
NONET_API = "1.1"


@hookimpl
def provide_schedulers():
    yield Component("bad_unmarked", "plugins.schedulers.fcfs:Fcfs", "first come, first served")


def provide_samplers():
    yield Component("bad_unmarked", "plugins.samplers.greedy:Greedy", "the most probable token")
