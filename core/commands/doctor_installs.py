"""What `doctor` looks for among installed plugins: shadowed modules, and what a half-done install or uninstall left behind."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points, packages_distributions
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from core.commands.findings import Finding
from core.components import PluginRecord
from core.plugins import ENTRY_POINT_GROUP, UNKNOWN, Plugins, distribution_of

PACKAGES = ("core", "plugins", "configs")


def package_check() -> list[Finding]:
    """Our three top-level names must come from one place; another wheel, or the working directory, may shadow them."""
    home = Path(__file__).resolve().parents[2]
    owners = packages_distributions()
    return [_package(name, home, owners) for name in PACKAGES]


def _package(name: str, home: Path, owners: Mapping[str, list[str]]) -> Finding:
    origin = _origin(name)
    found = origin.parents[1] if origin is not None else None
    others = sorted({owner for owner in owners.get(name, []) if canonicalize_name(owner) != "nonet"})
    if others:
        return Finding("fail", name, f"{', '.join(others)} ships a package of this name too; uninstall it")
    if found != home:
        return Finding("fail", name, f"comes from {found}, not {home}: a folder of that name shadows ours")
    return Finding("ok", name, str(found))


def plugin_check(plugins: Plugins) -> list[Finding]:
    """What each plugin's record says; a failed one keeps `serve` from starting."""
    findings = [_failed(plugins, record) for record in plugins.failed()]
    findings += [
        Finding("warn", record.name, f"{record.wheel} {warning}")
        for record in plugins.records
        for warning in record.warnings
    ]
    return findings or [Finding("ok", "plugins", f"{len(plugins.records)} found, all can be used")]


def _failed(plugins: Plugins, record: PluginRecord) -> Finding:
    (name,) = plugins.to_disable([record])
    reason = f"{record.wheel}: {record.reason}"
    return Finding("fail", record.name, f"{reason}; plugins.disable=[{name}] goes on without it")


def install_check(plugins: Plugins) -> list[Finding]:
    """Entry points without a module, files that are gone, two releases at once, and modules that hide a plugin's own."""
    owners = packages_distributions()
    points = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value))
    findings = [finding for point in points for finding in _point_findings(point, owners)]
    findings += _two_releases({"nonet", *filter(None, (_name(point.dist) for point in points))})
    return findings or [Finding("ok", "installs", f"{len(points)} installed plugins, none shadowed or stale")]


def _point_findings(point: EntryPoint, owners: Mapping[str, list[str]]) -> Iterator[Finding]:
    """Of one plugin, the first of what would explain the others: no metadata, no module, not its own module."""
    module = point.value.partition(":")[0].strip()
    name, origin = _name(point.dist), _origin(module)
    if point.dist is None or name is None:
        problem = "its wheel has no metadata: an uninstall was cut short; install it again, or remove what is left"
    elif origin is None:
        problem = f"{name}: its module {module} is gone; install it again, or uninstall {name}"
    elif not _owns(point.dist, origin):
        problem = f"{name}: its module {module} comes from {origin}, which is not of {name}; rename that"
    elif missing := _missing_files(point.dist):
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        problem = f"{name}: {missing[0]}{more} gone; install it again"
    elif others := _others(owners, module.partition(".")[0], name):
        problem = f"{name}: {', '.join(others)} ships a package {module.partition('.')[0]} too; uninstall one of them"
    else:
        yield from _version_findings(point, module.partition(".")[0], name)
        return
    yield Finding("fail", point.name, problem)


def _others(owners: Mapping[str, list[str]], package: str, name: str) -> list[str]:
    """Who else ships a package; a namespace package may be of many."""
    others = {owner for owner in owners.get(package, []) if canonicalize_name(owner) != canonicalize_name(name)}
    return sorted(others) if _origin(package) is not None else []


def _version_findings(point: EntryPoint, top: str, name: str) -> Iterator[Finding]:
    """Of a module that listing the plugins has imported; nothing is imported for it here."""
    said = getattr(sys.modules.get(top), "__version__", None)
    try:
        stale = isinstance(said, str) and point.dist is not None and Version(said) != Version(point.dist.version)
    except (InvalidVersion, TypeError):
        return
    if stale and point.dist is not None:
        yield Finding(
            "warn",
            point.name,
            f"{name} is {point.dist.version}, its module says __version__ = {said!r}; install it again",
        )


def _two_releases(names: Iterable[str]) -> Iterator[Finding]:
    """Of one distribution: an install into another place, or over files that an older one left."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for dist in distributions():
        place = str(Path(str(dist.locate_file(""))).resolve())
        found[canonicalize_name(_name(dist) or "")].add((distribution_of(dist)[1], place))
    for name in sorted(names):
        places = sorted(found[canonicalize_name(name)])
        if len({version for version, _ in places}) > 1:
            listed = " and as ".join(f"{version} in {place}" for version, place in places)
            yield Finding("fail", name, f"is installed as {listed}; uninstall it until none is left, then install one")


def _name(dist: Distribution | None) -> str | None:
    name, _ = distribution_of(dist)
    return None if name == UNKNOWN else name


def _origin(module: str) -> Path | None:
    """The file that `import module` would run; None where there is none, as for a namespace package."""
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # its parent cannot be imported: `plugin_check` says why
        spec = None
    return Path(spec.origin).resolve() if spec is not None and spec.has_location and spec.origin else None


def _missing_files(dist: Distribution | None) -> list[str]:
    files = (dist.files or []) if dist is not None else []
    return [str(file) for file in files if file.suffix in (".py", ".yaml") and not Path(str(file.locate())).exists()]


def _owns(dist: Distribution, origin: Path) -> bool:
    """Whether a distribution installed that file. True where it has no list of files to ask."""
    folder = _editable_folder(dist)
    if folder is not None:
        return origin.is_relative_to(folder)
    return dist.files is None or any(Path(str(file.locate())).resolve() == origin for file in dist.files)


def _editable_folder(dist: Distribution) -> Path | None:
    """Where an editable install has its sources (PEP 610)."""
    try:
        said = json.loads(dist.read_text("direct_url.json") or "{}")
        editable = said["dir_info"]["editable"] is True
    except (KeyError, TypeError, ValueError):
        return None
    return Path(url2pathname(urlsplit(said["url"]).path)).resolve() if editable else None
