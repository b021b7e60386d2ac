from core.hookspecs import Component, hookimpl

NONET_API = "1.1"


@hookimpl
def provide_scheduler():
    yield Component("unknown", "acme_bad.unknown_hook:X", "one letter is missing")
