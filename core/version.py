"""The version of this code. Imports no torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SOURCE = "0+source"  # what a bare checkout calls itself


def nonet_version() -> str:
    """Version of the installed distribution; a bare checkout has none. Read from disk at each call: see `core.wire.Hello`."""
    try:
        return version("nonet")
    except PackageNotFoundError:
        return SOURCE
