from core.hookspecs import Component, hookimpl

NONET_API = "1.1"


@hookimpl
def provide_schedulers():
    yield Component("fcfs", "acme_bad.builtin_name:X", "takes the name of a built-in")
