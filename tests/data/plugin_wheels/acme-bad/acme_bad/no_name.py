from core.hookspecs import Component, hookimpl

NONET_API = "1.1"


@hookimpl
def provide_schedulers():
    yield Component("", "acme_bad.no_name:X", "without a name")
