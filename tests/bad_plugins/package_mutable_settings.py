"""Settings that can be changed, and that take any key."""

from pydantic import BaseModel

from core.hookspecs import Component, hookimpl
from core.stages.decode import Plain

CAUGHT_BY = "test_settings_are_frozen_and_refuse_unknown_keys"
NONET_API = "1.1"


class Loose(Plain):
    class Settings(BaseModel):
        pass


@hookimpl
def provide_decodes():
    yield Component("bad_loose", "package_mutable_settings:Loose", "one token per step")
