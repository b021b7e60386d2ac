"""`models`: what lies in the model cache; `models pull SOURCE`, `models remove NAME`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import ConfigError, near_matches
from core.model.sources import DEFAULT_SOURCE, default_cache_dir, list_models, remove_model, resolve
from core.progress import ProgressBars

ACTIONS = ("list", "pull", "remove")


def run(arguments: Sequence[str]) -> int:
    action, rest = (arguments[0], list(arguments[1:])) if arguments else ("list", [])
    if action not in ACTIONS:
        raise ConfigError(f"unknown action {action!r}{near_matches(action, ACTIONS)}")
    if len(rest) > 1 or (action == "remove" and not rest) or (action == "list" and rest):
        raise ConfigError("usage: models [list | pull SOURCE | remove NAME]")
    if action == "pull":
        return _pull(rest[0] if rest else DEFAULT_SOURCE)
    if action == "remove":
        freed = remove_model(default_cache_dir(), rest[0], ProgressBars())
        print(f"removed {rest[0]} ({freed / 1e6:.0f} MB)")
        return 0
    return _list()


def _pull(source: str) -> int:
    print(resolve(source, cache_dir=default_cache_dir(), progress=ProgressBars()).path)
    return 0


def _list() -> int:
    models = list_models(default_cache_dir())
    for model in models:
        print(f"{model.name:<36}{model.size / 1e6:>8.0f} MB  {model.checksum:<12}{model.source}")
    if not models:
        print(f"no models in {default_cache_dir()}; `nonet models pull` fetches the default, {DEFAULT_SOURCE}")
    return 0
