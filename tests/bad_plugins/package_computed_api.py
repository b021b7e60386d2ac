"""Says that it is written for whatever version is installed, which nobody can know."""

from core.hookspecs import API_VERSION, Component, hookimpl

CAUGHT_BY = "test_the_api_version_is_a_literal_that_loads_here"
NONET_API = API_VERSION


@hookimpl
def provide_schedulers():
    yield Component("bad_computed_api", "plugins.schedulers.fcfs:Fcfs", "first come, first served")
