"""Wants to be built in a way of its own."""

from core.hookspecs import Component, hookimpl
from core.stages.decode import Plain

CAUGHT_BY = "test_each_component_is_made_of_settings_and_context"
NONET_API = "1.1"


class Picky(Plain):
    def __init__(self, settings, context, model):
        super().__init__(settings, context)


@hookimpl
def provide_decodes():
    yield Component("bad_arguments", "package_own_arguments:Picky", "one token per step")
