"""Whether layers are in groups, and what is said where swap memory keeps them from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.assembly import describe
from core.config.compose import compose
from core.kv_layout import tell_of_kept_windows, wants_groups
from core.plugins import load_plugins
from core.settings import Settings
from core.testing.engines import fake_spec

SLIDES = {"model_type": "fake", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
FULL = {"model_type": "fake", "layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize(
    ("config", "overrides", "grouped", "said"),
    [
        (SLIDES, (), True, False),
        (SLIDES, ("cache.num_swap_blocks=8",), False, True),
        (SLIDES, ("cache.swap_memory=1GiB",), False, True),
        (SLIDES, ("cache.num_swap_blocks=8", "cache.window_groups=false"), False, False),  # nobody asked for groups
        (FULL, ("cache.num_swap_blocks=8",), False, False),  # nothing is lost
    ],
)
def test_that_windows_are_kept_is_said_where_the_model_has_some(
    caplog: pytest.LogCaptureFixture, config: dict[str, Any], overrides: tuple[str, ...], grouped: bool, said: bool
) -> None:
    plugins = load_plugins(["all"])
    description = describe(Settings.from_config(compose(overrides, plugins).values), plugins)
    pool: Any = description.part("cache").settings
    with caplog.at_level("INFO", "nonet.engine"):
        assert wants_groups(description, pool) is grouped
        assert not caplog.records  # it is asked several times
        tell_of_kept_windows(description, pool, replace(fake_spec(), config=config))
    assert ["KV that leaves a sliding window is kept" in record.getMessage() for record in caplog.records] == [
        True
    ] * said
