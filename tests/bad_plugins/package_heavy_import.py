"""Listing this plugin imports torch, in every process that only wants to know what is installed."""

import torch  # noqa: F401

from core.hookspecs import Component, hookimpl

CAUGHT_BY = "test_listing_it_imports_nothing_heavy"
NONET_API = "1.1"


@hookimpl
def provide_schedulers():
    yield Component("bad_heavy", "plugins.schedulers.fcfs:Fcfs", "first come, first served")
