"""The paged cache keeps the contract of sliding-window groups, however its other settings are."""

from __future__ import annotations

from core.cache.paged import PagedCache
from core.testing.suites import words_of
from core.testing.window_groups import WindowGroupsContract


class TestPagedGroups16(WindowGroupsContract):
    component = PagedCache
    provides = words_of("cache", "paged")


class TestPagedGroups64(WindowGroupsContract):
    component = PagedCache
    provides = words_of("cache", "paged")
    settings = {"block_size": 64}


class TestPagedGroupsWithPins(WindowGroupsContract):
    component = PagedCache
    provides = words_of("cache", "paged")
    settings = {"block_size": 32, "pin_hits": 2, "max_pinned_fraction": 0.5}


class TestPagedGroupsWithoutSharing(WindowGroupsContract):
    component = PagedCache
    settings = {"enable_prefix_caching": False}
