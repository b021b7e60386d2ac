"""A plugin called as that of acme-turns is."""

from core.hookspecs import Component, hookimpl

NONET_API = "1.1"


@hookimpl
def provide_schedulers():
    yield Component("namesake", "acme_namesake:Namesake", "another one")
