"""Written for the next major version of the contract."""

from core.hookspecs import Component, hookimpl

CAUGHT_BY = "test_the_api_version_is_a_literal_that_loads_here"
NONET_API = "2.0"


@hookimpl
def provide_schedulers():
    yield Component("bad_api", "plugins.schedulers.fcfs:Fcfs", "first come, first served")
