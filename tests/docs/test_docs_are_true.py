"""Documents that can rot are compared with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core import docs
from core.cli import COMMANDS
from core.components import GROUPS, STAGES
from core.settings import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/README.md"), *ROOT.glob("benchmarks/*.md")]
)


def test_hooks_page_is_generated_from_the_specs():
    assert docs.TARGET.read_text(encoding="utf-8") == docs.render(), "run `make docs`"


def test_every_hook_has_a_heading_with_its_signature_and_an_example():
    page = docs.TARGET.read_text(encoding="utf-8")
    found = docs.hooks()
    assert {fn.__name__ for fn in found} >= {f"provide_{group}s" for group in GROUPS}
    for fn in found:
        assert f"## `{docs.signature(fn)}`" in page
        assert "Example::" in (fn.__doc__ or "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_walk_names_the_nine_stages_in_order():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (\d) (\w+)$", page, flags=re.M)
    assert headings == [(str(i), stage) for i, stage in enumerate(STAGES, start=1)]
    for stage in STAGES:
        assert f"core/stages/{stage}.py" in page
        assert (ROOT / f"core/stages/{stage}.py").exists()
        assert (ROOT / f"configs/{stage}").is_dir()


def test_every_command_exists_and_is_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert (ROOT / f"core/commands/{command}.py").exists()
        assert f"core {command}" in readme


def test_the_config_page_lists_every_group():
    page = (ROOT / "docs/configs.md").read_text(encoding="utf-8")
    assert all(f"`{group}`" in page for group in GROUPS)


def test_the_config_page_lists_every_key_beside_the_groups():
    page = (ROOT / "docs/configs.md").read_text(encoding="utf-8")
    assert f"{('Two', 'Three', 'Four')[len(SECTIONS) - 2]} sections belong to no group" in page
    for name, section in SECTIONS.items():
        for key in section.model_fields:
            assert f"`{name}.{key}`" in page or (name == "process" and f"`{key}`" in page), f"{name}.{key}"


FORBIDDEN = [
    r"\bpickle\b(?!d)", r"\bdill\b", r"cloudpickle", r"\bmarshal\b", r"\bshelve\b", r"recv_pyobj", r"torch\.load\(",
    r"joblib", r"yaml\.load\(", r"(?<![\w.])eval\(", r"(?<![\w.])exec\(", r"os\.system\(", r"shell=True",
]  # fmt: skip


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_no_code_path_deserialises_or_runs_strangers_code(pattern):
    for folder in ("core", "plugins", "configs", "scripts", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                assert not re.search(pattern, line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
