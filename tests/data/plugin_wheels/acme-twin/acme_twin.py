"""Claims a component's name that acme-turns has too."""

from core.hookspecs import Component, hookimpl

NONET_API = "1.1"


@hookimpl
def provide_schedulers():
    yield Component("turns", "acme_twin:Turns", "another one")
