from core.hookspecs import Component, hookimpl

NONET_API = "1.1"


@hookimpl
def provide_schedulers():
    yield Component("no_colon", "acme_bad.no_colon.X", "a target without a colon")
