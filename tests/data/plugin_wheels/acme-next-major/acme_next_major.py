"""What it imports from Nonet is not there yet: its version, not that, is the reason."""

from core.hookspecs import Registry

NONET_API = "2.0"

registry = Registry()
