"""NONET_API: which plugins this Nonet runs, and what explains that one cannot be imported."""

from __future__ import annotations

import pytest

import core.loading.api as plugin_api
from core.errors import PluginError
from core.hookspecs import API_VERSION
from core.loading.api import check_api, check_literal, unmet_requirement

MAJOR, MINOR = map(int, API_VERSION.split("."))


class FakeDistribution:
    def __init__(self, *requires: str):
        self.requires = list(requires) or None


@pytest.mark.parametrize("minor", range(MINOR + 1))
def test_each_minor_version_up_to_ours_is_run(minor):
    assert check_api(f"{MAJOR}.{minor}", "acme") == f"{MAJOR}.{minor}"


def is_for(declared: str, way_out: str) -> str:
    return f"is written for plugin API {declared}, this Nonet has {API_VERSION}; install a release of acme for API {way_out}"


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        (f"{MAJOR + 1}.0", is_for(f"{MAJOR + 1}.0", f"{MAJOR}, or a newer Nonet")),
        (f"{MAJOR}.{MINOR + 1}", is_for(f"{MAJOR}.{MINOR + 1}", f"{API_VERSION}, or a newer Nonet")),
        (f"{MAJOR - 1}.9", is_for(f"{MAJOR - 1}.9", f"{MAJOR}")),
        (
            None,
            f"does not say which plugin API it is written for; its module needs the line NONET_API = '{API_VERSION}'",
        ),
        (1.1, f"NONET_API = 1.1 is no plugin API version; write a string as in '{API_VERSION}'"),
        ("", "NONET_API = '' is no plugin API version"),
        ("1", "NONET_API = '1' is no"),
        ("1.1.0", "NONET_API = '1.1.0' is no"),
        ("1.1\n", "NONET_API = '1.1\\n' is no"),
        ("-1.1", "NONET_API = '-1.1' is no"),
        ("1." + "9" * 5000, "is no plugin API version"),
        ("१.१", "is no plugin API version"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_all_others_are_refused_with_the_next_step(declared, reason):
    with pytest.raises(PluginError) as refused:
        check_api(declared, "acme")
    assert reason in str(refused.value)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes `acme_literal.plugin`, whose package cannot be imported."""
    folder = tmp_path / "acme_literal"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('run')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> str:
        (folder / "plugin.py").write_text(text, encoding="utf-8")
        return "acme_literal.plugin"

    return write


@pytest.mark.parametrize("line", ["NONET_API = '9.0'", "NONET_API: str = '9.0'", "X = NONET_API = '9.0'"])
def test_the_literal_is_read_without_running_anything(package, line):
    module = package(f"import nowhere\n{line}\nraise SystemExit\n")
    with pytest.raises(PluginError, match=r"written for plugin API 9\.0"):
        check_literal(module, "acme")


@pytest.mark.parametrize("text", ["", "NONET_API = '1.0'", "NONET_API = version()", "def (", "NONET_API: str", "\0"])
def test_what_says_nothing_or_is_run_here_explains_nothing(package, text):
    check_literal(package(text), "acme")
    check_literal("nowhere.at.all", "acme")
    check_literal("sys", "acme")
    check_literal("", "acme")


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        (("nonet>=2.0",), "asks for nonet>=2.0, and 0.1.0 is installed"),
        (("pytest", "Nonet<0.1"), "asks for Nonet<0.1, and 0.1.0 is installed"),
        (("nonet>=0.1,<0.2", "pytest>=1"), None),
        (("surely-not-installed>=3",), "asks for surely-not-installed>=3, and it is not installed"),
        (("surely-not-installed; extra == 'dev'", "surely-not-installed; python_version < '3'"), None),
        (("pytest>=9999",), "asks for pytest>=9999, and "),
        (("not a requirement",), None),
        ((), None),
    ],
)
def test_what_a_wheel_asks_for_and_has_not(monkeypatch, requires, expected):
    monkeypatch.setattr(plugin_api, "nonet_version", lambda: "0.1.0")
    found = unmet_requirement(FakeDistribution(*requires))
    assert found == expected or (found is not None and found.startswith(expected))


def test_a_checkout_has_no_version_to_compare(monkeypatch):
    monkeypatch.setattr(plugin_api, "nonet_version", lambda: "0+source")
    assert unmet_requirement(FakeDistribution("nonet>=2.0")) is None
    assert unmet_requirement(None) is None
