"""Does not say which version of the contract it was written for."""

from core.hookspecs import Component, hookimpl

CAUGHT_BY = "test_the_api_version_is_a_literal_that_loads_here"


@hookimpl
def provide_schedulers():
    yield Component("bad_no_api", "plugins.schedulers.fcfs:Fcfs", "first come, first served")
