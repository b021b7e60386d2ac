"""Requires a word that is misspelt: no pipeline could ever have it."""

from core.hookspecs import Component, hookimpl

CAUGHT_BY = "test_words_are_known"
NONET_API = "1.1"


@hookimpl
def provide_schedulers():
    yield Component(
        "unknown_word",
        "plugins.schedulers.fcfs:Fcfs",
        "first come, first served",
        requires=("sampler.logit_processors",),
    )
