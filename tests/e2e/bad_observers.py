"""A third party's observers that do what they must not."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from core.hookspecs import Component, hookimpl

NONET_API = "1.1"


class Bad:
    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings: Settings, context: object):
        pass

    def step_finished(self, stats: object) -> None:
        pass

    def request_finished(self, record: object) -> None:
        pass

    def close(self) -> None:
        pass


class Raises(Bad):
    def step_finished(self, stats: object) -> None:
        raise RuntimeError("no room for this step")


class Exits(Bad):
    def request_finished(self, record: object) -> None:
        sys.exit("enough")


class Blocks(Bad):
    def request_finished(self, record: object) -> None:
        time.sleep(3600)

    close = step_finished = request_finished  # type: ignore[assignment]


class Unbuilt(Bad):
    def __init__(self, settings: object, context: object):
        raise OSError("the ledger's database is gone")


@hookimpl
def provide_observers() -> Iterable[Component]:
    for cls in (Raises, Exits, Blocks, Unbuilt):
        yield Component(f"bad_{cls.__name__.lower()}", f"{__name__}:{cls.__name__}", "for tests")
