from core.hookspecs import hookimpl

NONET_API = "1.1"


@hookimpl
def provide_schedulers():
    yield "no_component", "acme_bad.no_component:X"
