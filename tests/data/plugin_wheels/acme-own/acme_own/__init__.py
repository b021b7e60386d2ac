"""Written for plugin API 1.0: a cache and a scheduler that inherit nothing but the settings that each must have."""

from core.hookspecs import Component, hookimpl

NONET_API = "1.0"


@hookimpl
def provide_caches():
    yield Component("own", "acme_own.cache:OwnCache", "prefixes by their ids", provides=("prefix_sharing",))


@hookimpl
def provide_schedulers():
    yield Component("own", "acme_own.scheduler:OwnScheduler", "first come, first served")
