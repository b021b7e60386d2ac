from core.hookspecs import Component, hookimpl

NONET_API = "1.9"


@hookimpl
def provide_schedulers():
    yield Component("minor", "acme_next_minor:Minor", "needs what API 1.9 has")
