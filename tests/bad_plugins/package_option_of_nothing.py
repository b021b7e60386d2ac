"""Its config group has an option for a component that nobody provides."""

from core.hookspecs import Component, hookimpl

CAUGHT_BY = "test_config_options_are_of_components"
NONET_API = "1.1"
FILES = {
    "bad_option_configs/__init__.py": "",
    "bad_option_configs/scheduler/bad_option.yaml": "name: bad_option\n",
    "bad_option_configs/scheduler/bad_opton.yaml": "name: bad_opton\n",
}


@hookimpl
def provide_schedulers():
    yield Component("bad_option", "plugins.schedulers.fcfs:Fcfs", "first come, first served")


@hookimpl
def provide_config_packages():
    yield "bad_option_configs"
