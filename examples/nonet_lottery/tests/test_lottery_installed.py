"""First of all: is the plugin installed, and does Nonet see it? (`pip install -e .` when this fails.)"""

from core.plugins import load_plugins
from core.session import open_session


def test_my_plugin_is_installed():
    record = {record.name: record for record in load_plugins().records}["lottery"]
    assert (record.distribution, record.status) == ("nonet-lottery", "loaded"), record.reason


def test_my_config_is_found():
    part = open_session(["scheduler=lottery"]).description.part("scheduler")
    assert part.wheel.startswith("nonet-lottery ")
    assert part.settings.tickets == 10  # from nonet_lottery/configs/scheduler/lottery.yaml


def test_my_preset_is_found_and_can_be_overridden():
    session = open_session(["+preset=lottery", "scheduler.tickets=3", "scheduler.tenant_tickets.silver=20"])
    settings = session.description.part("scheduler").settings
    assert (settings.tickets, settings.tenant_tickets) == (3, {"gold": 30, "silver": 20})
