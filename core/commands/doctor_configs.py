"""What `doctor` looks for in the YAML of plugins: an option given twice, and an option that selects no component."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from core.commands.findings import Finding
from core.components import CHAINS, GROUPS
from core.config.bounds import check_bounds
from core.errors import near_matches
from core.plugins import Plugins

OURS = "configs"


def option_check(plugins: Plugins) -> list[Finding]:
    """Options of all config packages, ours included. Hydra takes the first of two files for one option, without a word."""
    files = [
        (package, option, path) for package in (OURS, *plugins.config_packages()) for option, path in _options(package)
    ]
    places: dict[str, list[str]] = defaultdict(list)
    for package, option, _ in files:
        places[option].append(package)
    findings = [
        Finding("fail", option, f"is in {' and in '.join(packages)}, and only the first counts; rename or disable one")
        for option, packages in places.items()
        if len(packages) > 1
    ]
    for package, option, path in files:
        findings += [Finding("fail", option, f"{package}: {problem}") for problem in _problems(plugins, option, path)]
    return findings or [Finding("ok", "options", f"{len(files)} config files, each names what there is")]


def _options(package: str) -> Iterator[tuple[str, Path]]:
    """("scheduler/lottery", the file) for each YAML file of an importable package."""
    spec = importlib.util.find_spec(package)
    for folder in sorted(map(Path, (spec and spec.submodule_search_locations) or [])):
        for path in sorted(folder.rglob("*.yaml")):
            yield path.relative_to(folder).with_suffix("").as_posix(), path


def _problems(plugins: Plugins, option: str, path: Path) -> Iterator[str]:
    group, slash, _ = option.rpartition("/")
    if not slash or group not in (*GROUPS, *CHAINS):
        return
    try:
        check_bounds(path)
        if path.read_text(encoding="utf-8").lstrip().startswith("# @package"):
            return
        values: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:  # YAML has many ways to be wrong, bytes have one more
        yield f"{path} cannot be read: {' '.join(str(error).split())}"
        return
    known = plugins.names(group)
    for name in _selected(group, values):
        if name is None:
            yield f"{path.name} has no `name: …`, so it selects nothing"
        elif name not in known:
            yield f"{path.name} names no {group} that is installed: {name!r}{near_matches(str(name), known)}"


def _selected(group: str, values: Any) -> list[object]:
    """What a file selects: `name: fcfs`, or the keys of a chain. A file that builds on others may leave it to them."""
    if not isinstance(values, dict):
        return [values] if group in GROUPS else []
    if "defaults" in values and "name" not in values:
        return []
    return list(values) if group in CHAINS else [values.get("name")]
