"""Written for this API, and for a release of Nonet that has more beside it."""

from core.scheduling.policy import Tournament

NONET_API = "1.1"

tournament = Tournament()
