"""What one plugin says it has: imported and asked in a thread of its own, and every word of it checked. Imports no torch.

A stranger's module may raise anything, ask to exit, or never return. The thread keeps all of that away from the process,
and Ctrl-C, which goes to the main thread, is never mistaken for a plugin's own KeyboardInterrupt.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from importlib.metadata import EntryPoint
from itertools import islice
from typing import Any

import pluggy

from core import hookspecs
from core.capabilities import malformed
from core.components import CHAINS, GROUPS, hook_of
from core.errors import PluginError, described, near_matches, printable, shown
from core.hookspecs import PROJECT, SINCE, Component
from core.loading.api import LITERAL, check_api, check_literal, unmet_requirement, version_of

HEAVY = ("torch", "transformers")
MAX_YIELDED = 1000  # per hook: a generator that never ends must not fill the memory
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
MAX_SUMMARY = 200  # characters
TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
NOT_NAMES = frozenset({"null", "true", "false", "inf", "nan"})  # Hydra's grammar reads a value in them, not a name


@dataclass(frozen=True, slots=True)
class Listing:
    """What a plugin says of itself. `warnings`: what its author should mend, though it can be used."""

    api: str
    components: tuple[tuple[str, Component], ...] = ()  # (group, component)
    config_packages: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def list_entry_point(point: EntryPoint, distribution: str, timeout_s: float) -> Listing:
    """Import what an entry point names, and ask its hooks. Raises PluginError with the reason, in one line.

    A plugin that does not answer in `timeout_s` is left behind in its daemon thread.
    """
    answer: Future[Listing] = Future()
    threading.Thread(
        target=_answer, args=(answer, point, distribution), name=f"load plugin {point.name}", daemon=True
    ).start()
    try:
        error = answer.exception(timeout_s)
    except TimeoutError:
        raise PluginError(f"did not load within {timeout_s:g} s; give it longer with plugins.start_timeout=…") from None
    if error is not None:
        raise error
    return answer.result()


def _answer(answer: Future[Listing], point: EntryPoint, distribution: str) -> None:
    try:
        answer.set_result(_listing(point, distribution))
    except BaseException as error:  # whatever it is, it ends this plugin and nothing else
        answer.set_exception(PluginError(described(error)))


def _listing(point: EntryPoint, distribution: str) -> Listing:
    before = _heavy()
    plugin = _imported(point, distribution)
    declared = getattr(plugin, LITERAL, None) or getattr(sys.modules.get(_module_of(point)), LITERAL, None)
    listing = list_plugin(plugin, check_api(declared, distribution))
    heavy = tuple(
        f"imports {name} when it is listed; import it in the modules that its targets name"
        for name in sorted(_heavy() - before)
    )
    return Listing(listing.api, listing.components, listing.config_packages, listing.hooks, (*listing.warnings, *heavy))


def _heavy() -> set[str]:
    return {name for name in HEAVY if name in sys.modules}


def _module_of(point: EntryPoint) -> str:
    return point.value.partition(":")[0].strip()


def _imported(point: EntryPoint, distribution: str) -> object:
    """Where the import fails, the reason is what explains it: another API, or a requirement that is not met."""
    try:
        return point.load()
    except BaseException as error:
        check_literal(_module_of(point), distribution)
        unmet = unmet_requirement(point.dist)
        raise PluginError(described(error) + (f"; {distribution} {unmet}" if unmet else "")) from error


def list_plugin(plugin: object, api: str) -> Listing:
    """Ask the hooks of an imported plugin. Raises PluginError naming what is wrong, or whatever its hooks raise.

    The hooks are asked in a manager of the plugin's own, so nothing has to be undone where one fails.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, "plugin")
    known = {name for name, caller in vars(manager.hook).items() if caller.has_spec()}
    hooks = tuple(sorted(caller.name for caller in manager.get_hookcallers(plugin) or []))
    _refuse_unknown_hooks(manager, known)
    components = tuple((group, c) for group in (*GROUPS, *CHAINS) for c in _components(manager, group))
    _refuse_repeated(components)
    warnings = (*_warnings(plugin, known, hooks), *_newer(api, hooks, components))
    return Listing(api, components, _config_packages(manager), hooks, warnings)


def _refuse_unknown_hooks(manager: pluggy.PluginManager, known: set[str]) -> None:
    for name, caller in vars(manager.hook).items():
        if not caller.has_spec() and not all(impl.optionalhook for impl in caller.get_hookimpls()):
            raise PluginError(f"implements an unknown hook {name!r}{near_matches(name, known)}")


def _warnings(plugin: object, known: set[str], hooks: tuple[str, ...]) -> Iterator[str]:
    own = getattr(plugin, "__name__", None)
    for name in sorted(known - {*hooks}):
        found = inspect.getattr_static(plugin, name, None)
        if inspect.isfunction(found) and found.__module__ == own:
            yield f"its function {name} is not marked @hookimpl, and is not called"
    if not hooks:
        yield "implements no hook, so it provides nothing"


def _newer(api: str, hooks: Iterable[str], components: Iterable[tuple[str, Component]]) -> Iterator[str]:
    """What the plugin uses that the API version which it declares does not have."""
    used = {f"Component.{field.name}" for _, one in components for field in fields(one) if getattr(one, field.name)}
    newer = [what for what in SINCE if what in used.union(hooks) and version_of(SINCE[what]) > version_of(api)]
    if newer:
        needed = max((SINCE[what] for what in newer), key=version_of)
        yield f"says {LITERAL} = {api!r} and uses {', '.join(newer)}, which is newer; write {LITERAL} = {needed!r}"


def _components(manager: pluggy.PluginManager, group: str) -> Iterator[Component]:
    hook = hook_of(group)
    for component in _yielded(manager, hook):
        if not isinstance(component, Component):
            raise PluginError(f"{hook} must yield core.hookspecs.Component, not {type(component).__name__}")
        check_component(group, component)
        yield replace(component, summary=printable(component.summary, MAX_SUMMARY))


def _config_packages(manager: pluggy.PluginManager) -> tuple[str, ...]:
    packages = tuple(_yielded(manager, "provide_config_packages"))
    for package in packages:
        if not isinstance(package, str):
            raise PluginError(f"provide_config_packages must yield package names, not {type(package).__name__}")
        if importlib.util.find_spec(package) is None:
            raise PluginError(f"provide_config_packages yields {package!r}, and there is no such package")
    return packages


def _yielded(manager: pluggy.PluginManager, hook: str) -> Iterator[Any]:
    for found in getattr(manager.hook, hook)():
        if isinstance(found, str) or not isinstance(found, Iterable):
            raise PluginError(f"{hook} must yield, or return a list; it returned {type(found).__name__}")
        yielded = list(islice(found, MAX_YIELDED + 1))
        if len(yielded) > MAX_YIELDED:
            raise PluginError(f"{hook} yields more than {MAX_YIELDED}")
        yield from yielded


def _refuse_repeated(components: tuple[tuple[str, Component], ...]) -> None:
    seen = set()
    for group, component in components:
        if (group, component.name) in seen:
            raise PluginError(f"provides {group}={component.name} twice")
        seen.add((group, component.name))


def check_component(group: str, component: Component) -> None:
    """Raises PluginError naming group, component and field where a field is not what its docstring says."""
    name = component.name
    if not isinstance(name, str) or not name:
        raise PluginError(f"{hook_of(group)} yields a component without a name ({name!r})")
    if not NAME.fullmatch(name) or name.lower() in NOT_NAMES:
        raise PluginError(
            f"{group}={shown(name)} cannot be a name: 64 letters, digits, _ and - at most, with a letter first, and none of "
            f"{', '.join(sorted(NOT_NAMES))}"
        )
    for field in ("target", "settings", "params"):
        value = getattr(component, field)
        if (field == "target" or value is not None) and not (isinstance(value, str) and TARGET.fullmatch(value)):
            raise PluginError(f'{group}={name}: {field}={value!r} is not written as "package.module:Class"')
    if not isinstance(component.summary, str):
        raise PluginError(f"{group}={name}: summary must be a line of text, not {type(component.summary).__name__}")
    _check_words(f"{group}={name}", component)


def _check_words(who: str, component: Component) -> None:
    for field in ("provides", "requires", "conflicts"):
        words = getattr(component, field)
        if not isinstance(words, tuple) or not all(isinstance(word, str) and word for word in words):
            raise PluginError(f"{who}: {field} must be a tuple of words, as in ('a.b',), not {words!r}")
    accepts = component.accepts
    if not isinstance(accepts, Mapping) or not all(isinstance(values, tuple) for values in accepts.values()):
        raise PluginError(f"{who}: accepts must map a fact to a tuple of values, not {accepts!r}")
    if problems := malformed(component):
        raise PluginError(f"{who}: {'; '.join(problems)}")
