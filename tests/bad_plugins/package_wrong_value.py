"""Its YAML sets a key that the component does not have."""

from core.hookspecs import Component, hookimpl

CAUGHT_BY = "test_config_options_are_of_components"
NONET_API = "1.1"
FILES = {
    "bad_value_configs/__init__.py": "",
    "bad_value_configs/scheduler/bad_value.yaml": "name: bad_value\ntikets: 3\n",
}


@hookimpl
def provide_schedulers():
    yield Component("bad_value", "plugins.schedulers.fcfs:Fcfs", "first come, first served")


@hookimpl
def provide_config_packages():
    yield "bad_value_configs"
