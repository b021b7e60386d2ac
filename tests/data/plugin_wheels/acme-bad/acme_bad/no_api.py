from core.hookspecs import Component, hookimpl


@hookimpl
def provide_schedulers():
    yield Component("no_api", "acme_bad.no_api:X", "says nothing of the API")
