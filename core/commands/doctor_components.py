"""What `doctor` finds in what plugins say of their components: targets that are not there, words that nobody provides.

Reads source files, and imports nothing: a target may need torch, or a device.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from core.capabilities import unknown_words
from core.commands.findings import Finding
from core.components import PluginRecord
from core.errors import near_matches
from core.hookspecs import Component
from core.plugins import Plugins


def component_check(plugins: Plugins) -> list[Finding]:
    findings = [finding for record in plugins.records for finding in _findings(record, plugins)]
    num_components = sum(len(record.components) for record in plugins.records)
    return findings or [Finding("ok", "components", f"{num_components} found, each where its plugin says it is")]


def _findings(record: PluginRecord, plugins: Plugins) -> Iterator[Finding]:
    for group, component in record.components:
        who = f"{group}={component.name}"
        for path in _paths(component):
            if problem := missing_target(path):
                yield Finding("fail", record.name, f"{record.wheel}: {who}: {path!r}: {problem}")
    for warning in unknown_words(record, plugins):
        yield Finding("warn", record.name, f"{record.wheel}: {warning}")


def _paths(component: Component) -> Iterator[str]:
    yield component.target
    yield from filter(None, (component.settings, component.params))


def missing_target(path: str) -> str | None:
    """Why "package.module:Name" cannot be imported; None where it can, or where only running its module would tell."""
    module, _, attribute = path.partition(":")
    found = _spec(module)
    if isinstance(found, str):
        return found
    if found.origin is None or not found.has_location or Path(found.origin).suffix != ".py":
        return None  # built in, compiled, or a namespace
    names = _names(Path(found.origin))
    name = attribute.partition(".")[0]
    if names is None or name in names:
        return None
    return f"its module {module} has no {name}{near_matches(name, names)}"


def _spec(module: str) -> ModuleSpec | str:
    """Like `importlib.util.find_spec`, which would import the packages around it. A text says what is missing."""
    first, *rest = module.split(".")
    try:
        spec = sys.modules[first].__spec__ if first in sys.modules else importlib.util.find_spec(first)
        place = first
        for word in rest:
            folders = None if spec is None else spec.submodule_search_locations
            if folders is None:
                break
            place = f"{place}.{word}"
            spec = PathFinder.find_spec(place, list(folders))
            if spec is None:
                return f"there is no module {place}{near_matches(word, _modules(list(folders)))}"
    except (ImportError, ValueError, OSError) as error:
        return f"its module cannot be found: {error}"
    return spec if spec is not None and place == module else f"there is no module {module}"


def _modules(folders: list[str]) -> set[str]:
    entries = [entry for folder in folders if Path(folder).is_dir() for entry in Path(folder).iterdir()]
    return {entry.stem for entry in entries if entry.suffix == ".py" or (entry / "__init__.py").exists()} - {"__init__"}


def _names(path: Path) -> set[str] | None:
    """What a module's source binds at its top; None where it may bind more than can be read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in ast.walk(tree):  # also names bound in an `if` or a `try`; a name too many does no harm
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return None if names & {"*", "__getattr__"} or "globals" in _calls(tree) else names


def _calls(tree: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}
