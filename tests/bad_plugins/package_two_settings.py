"""Config is checked against one class of settings, and the component is built from another."""

from pydantic import BaseModel, ConfigDict

from core.hookspecs import Component, hookimpl
from core.stages.decode import Plain

CAUGHT_BY = "test_settings_are_the_same_in_both_places"
NONET_API = "1.1"


class Values(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Two(Plain):
    pass


@hookimpl
def provide_decodes():
    yield Component("bad_two", "package_two_settings:Two", "one token per step", settings="package_two_settings:Values")
