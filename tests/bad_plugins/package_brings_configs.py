"""Its wheel brings a package called `configs`, which is written over Nonet's."""

from core.hookspecs import Component, hookimpl

CAUGHT_BY = "test_the_wheel_brings_only_packages_of_its_own"
NONET_API = "1.1"
FILES = {"configs/scheduler/bad_place.yaml": "name: bad_place\n"}


@hookimpl
def provide_schedulers():
    yield Component("bad_place", "plugins.schedulers.fcfs:Fcfs", "first come, first served")
