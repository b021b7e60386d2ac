"""Its component is not where it says."""

from core.hookspecs import Component, hookimpl

CAUGHT_BY = "test_each_component_can_be_imported"
NONET_API = "1.1"


@hookimpl
def provide_decodes():
    yield Component("bad_target", "package_no_target:Nothing", "one token per step")
