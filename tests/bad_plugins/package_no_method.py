"""A decode that proposes nothing because it has no such method."""

from core.hookspecs import Component, hookimpl
from core.stages.decode import Plain

CAUGHT_BY = "test_each_component_has_the_methods_of_its_contract"
NONET_API = "1.1"


class Unable:
    Settings = Plain.Settings

    def __init__(self, settings, context):
        pass


@hookimpl
def provide_decodes():
    yield Component("bad_method", "package_no_method:Unable", "one token per step")
