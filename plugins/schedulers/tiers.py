"""What the settings of schedulers with tiers share."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from core.errors import shown


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
                both = f"{tier_of[tenant]} and {name}"
                raise ValueError(f"scheduler.tiers: the tenant {shown(tenant)} is in {both}; keep it in one of them")
