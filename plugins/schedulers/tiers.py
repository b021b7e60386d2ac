"""What the settings of schedulers with tiers share."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field


class Tier(BaseModel):
    """Tenants that are treated alike; a scheduler adds how."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    tenants: tuple[str, ...] = Field(min_length=1, description="tenants in this tier")


def check_tiers(tiers: Mapping[str, Tier]) -> None:
    """Raises ValueError for a tier without a name, and for a tenant that is in two tiers."""
    if "" in tiers:
        raise ValueError("scheduler.tiers: a tier has an empty name; give it one")
    tier_of: dict[str, str] = {}
    for name, tier in tiers.items():
        for tenant in tier.tenants:
            if tier_of.setdefault(tenant, name) != name:
                raise ValueError(f"scheduler.tiers: a tenant of {name} is in {tier_of[tenant]} too; keep one")
