from core.hookspecs import Component, hookimpl

NONET_API = "1.1"


@hookimpl
def provide_schedulers():
    yield Component("loose", "acme_bad.loose:Loose", "its settings take anything")
