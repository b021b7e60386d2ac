from core.hookspecs import Component, hookimpl

NONET_API = "1.1"


@hookimpl
def provide_schedulers():
    import torch

    yield Component("heavy", "acme_bad.heavy:X", f"listed with torch {torch.__version__}")
