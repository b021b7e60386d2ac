"""Nobody who lists plugins learns what it is."""

from core.hookspecs import Component, hookimpl

CAUGHT_BY = "test_each_component_says_in_a_line_what_it_is"
NONET_API = "1.1"


@hookimpl
def provide_schedulers():
    yield Component("bad_summary", "plugins.schedulers.fcfs:Fcfs", "")
