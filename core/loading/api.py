"""Is a plugin written for the contract that this Nonet has? And if it cannot be imported, what would explain that?

A plugin for 1.N loads where N is not past ours (`core.hookspecs.API_VERSION`). Imports no torch and no plugin.
"""

from __future__ import annotations

import ast
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from core.errors import PluginError
from core.hookspecs import API_VERSION
from core.version import SOURCE, nonet_version

LITERAL = "NONET_API"
"""Name of the line in a plugin's module, NONET_API = "1.1". A literal, so that it can be read without running the module."""


def check_api(declared: object, distribution: str) -> str:
    """The version that a plugin declares. Raises PluginError where this Nonet cannot run it, or where it declares none."""
    if declared is None:
        raise PluginError(
            f"does not say which plugin API it is written for; its module needs the line {LITERAL} = {API_VERSION!r}"
        )
    found = re.fullmatch(r"([0-9]{1,4})\.([0-9]{1,4})", declared) if isinstance(declared, str) else None
    if found is None:
        raise PluginError(f"{LITERAL} = {declared!r} is no plugin API version; write a string as in {API_VERSION!r}")
    ours_major, ours_minor = version_of(API_VERSION)
    major, minor = version_of(found[0])
    if major != ours_major or minor > ours_minor:
        older = f"{ours_major}" if major != ours_major else API_VERSION
        newer = ", or a newer Nonet" if (major, minor) > (ours_major, ours_minor) else ""
        raise PluginError(
            f"is written for plugin API {found[0]}, this Nonet has {API_VERSION}; "
            f"install a release of {distribution} for API {older}{newer}"
        )
    return found[0]


def version_of(api: str) -> tuple[int, int]:
    """Major and minor: "1.10" is newer than "1.9"."""
    major, minor = api.split(".")
    return int(major), int(minor)


def check_literal(module: str, distribution: str) -> None:
    """`check_api` of what the source of `module` says, for a module that cannot be imported. Runs none of its code."""
    declared = declared_literal(module)
    if declared is not None:
        check_api(declared, distribution)


def declared_literal(module: str) -> object:
    """What the source of `module` says its API version is; None where it has no such line. Runs none of its code."""
    source = _source(module)
    return None if source is None else _literal(source)


def _source(module: str) -> Path | None:
    search: list[str] | None = None
    origin = None
    if not all(word.isidentifier() for word in module.split(".")):
        return None
    for part in range(1, module.count(".") + 2):
        spec = _spec(".".join(module.split(".")[:part]), search)
        if spec is None:
            return None
        origin, search = spec.origin, list(spec.submodule_search_locations or [])
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _spec(name: str, search: list[str] | None) -> ModuleSpec | None:
    """As an import finds it, also in an editable install, whose finder knows where the sources are."""
    found = (finder.find_spec(name, search) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def _literal(source: Path) -> object:
    try:
        body = ast.parse(source.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None
    for node in body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        named = any(isinstance(target, ast.Name) and target.id == LITERAL for target in targets)
        if named and isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            return node.value.value
    return None


def unmet_requirement(distribution: Distribution | None) -> str | None:
    """What a wheel asks for and does not have: "asks for nonet>=2.0, and 0.1.0 is installed". None where all is there."""
    for text in (distribution.requires or []) if distribution is not None else []:
        try:
            wanted = Requirement(text)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            problem = _problem(wanted)
        except (InvalidRequirement, ValueError):
            continue
        if problem:
            return f"asks for {wanted.name}{wanted.specifier}, and {problem}"
    return None


def _problem(wanted: Requirement) -> str | None:
    try:
        found = nonet_version() if canonicalize_name(wanted.name) == "nonet" else version(wanted.name)
    except PackageNotFoundError:
        return "it is not installed"
    fits = found == SOURCE or wanted.specifier.contains(found, prereleases=True)
    return None if fits else f"{found} is installed"
