"""Written for plugin API 1.0: a component hook and a config package, and nothing that came later."""

from core.hookspecs import Component, hookimpl

NONET_API = "1.0"


@hookimpl
def provide_schedulers():
    yield Component("turns", "acme_turns.turns:Turns", "the newest waiting request first")


@hookimpl
def provide_config_packages():
    yield "acme_turns.configs"
