"""`plugins check PACKAGE`: run the conformance suites against what an installed package provides. Imports no torch itself.

Exit code 0 when every check passed, 1 when one failed, 2 for a command that names nothing to check.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from core.commands.words import words_of
from core.components import CHAINS, GROUPS
from core.errors import ConfigError, near_matches
from core.plugins import BUILTINS, ENTRY_POINT_GROUP, distribution_of
from core.testing.conformance import Checked, Subject, check

USAGE = (
    "usage: plugins check PACKAGE | --builtins [--group GROUP] [--component NAME] [--set KEY=VALUE …] [--model PATH] "
    "[--timeout SECONDS] [--verbose] [--json]; PACKAGE is a distribution or a plugin"
)
VALUED = ("--group", "--component", "--set", "--model", "--timeout")
FLAGS = ("--builtins", "--verbose", "--json")


@dataclass(frozen=True, slots=True)
class Arguments:
    package: str  # "" with --builtins
    values: dict[str, str]  # of --group, --component, --model, --timeout, where given
    overrides: tuple[str, ...]
    flags: frozenset[str]

    @property
    def timeout(self) -> float:
        try:
            seconds = float(self.values.get("--timeout", "60"))
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= 3600:
            raise ConfigError(
                f"--timeout={self.values['--timeout']}: seconds of one check, more than 0 and at most 3600"
            )
        return seconds


def run(arguments: Sequence[str]) -> int:
    try:
        asked = _parsed(arguments)
        plugins = BUILTINS if "--builtins" in asked.flags else _plugins_of(asked.package)
        _check_tools()
        timeout = asked.timeout
        group, component = asked.values.get("--group", ""), asked.values.get("--component", "")
        subject = Subject(plugins, group, component, asked.overrides, asked.values.get("--model", ""))
        found = check(subject, timeout)
    except ConfigError as error:
        print(f"nonet plugins check: {error}", file=sys.stderr)
        return 2
    if (group or component) and not any(one.failed or not one.subject.startswith("plugin ") for one in found):
        what = f"{group or 'component'} called {component!r}" if component else group
        print(
            f"nonet plugins check: {asked.package or 'Nonet'} provides no {what}; see `nonet plugins`", file=sys.stderr
        )
        return 2
    if "--json" in asked.flags:
        print(json.dumps(report(found), indent=2, ensure_ascii=False))
    else:
        _print(found, verbose="--verbose" in asked.flags)
    return int(any(one.failed for one in found))


def _parsed(arguments: Sequence[str]) -> Arguments:
    """Raises ConfigError with the usage."""
    names: list[str] = []
    values: dict[str, str] = {}
    overrides: list[str] = []
    flags: set[str] = set()
    words = iter(words_of(arguments))
    for word in words:
        if word in VALUED:
            value = next(words, "")
            if not value:
                raise ConfigError(f"{word} needs a value; {USAGE}")
            if word == "--set":
                overrides.append(value)
            else:
                values[word] = str(Path(value).absolute()) if word == "--model" else value
        elif word in FLAGS:
            flags.add(word)
        elif word.startswith("-"):
            raise ConfigError(f"unknown argument {word!r}{near_matches(word, (*VALUED, *FLAGS))}; {USAGE}")
        else:
            names.append(word)
    if len(names) + ("--builtins" in flags) != 1:
        raise ConfigError(USAGE)
    group = values.get("--group", "")
    if group and group not in (*GROUPS, *CHAINS):
        raise ConfigError(f"--group: there is no group {group!r}{near_matches(group, (*GROUPS, *CHAINS))}")
    return Arguments(names[0] if names else "", values, tuple(overrides), frozenset(flags))


def _plugins_of(package: str) -> tuple[str, ...]:
    """Plugins of a distribution, or the one of that name; a built-in module by its name. Imports none of them."""
    if package in BUILTINS:
        return (package,)
    points = entry_points(group=ENTRY_POINT_GROUP)
    wanted = canonicalize_name(package)
    found = [
        p.name for p in points if wanted in (canonicalize_name(p.name), canonicalize_name(distribution_of(p.dist)[0]))
    ]
    if not found:
        known = {name for point in points for name in (point.name, distribution_of(point.dist)[0])}
        hint = near_matches(package, known) if known else "; no plugin is installed"
        raise ConfigError(f"no installed package or plugin is called {package!r}{hint}; install it, then check it")
    return tuple(dict.fromkeys(found))


def _check_tools() -> None:
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError("the checks need pytest; pip install pytest")


def report(found: Sequence[Checked]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "components": [
            {
                "subject": one.subject,
                "checks": one.num_checks,
                "skipped": one.num_skipped,
                "failed": [{"check": f.check, "reason": f.reason, "times": f.failed} for f in one.failed],
            }
            for one in found
        ],
        "checks": sum(one.num_checks for one in found),
        "failed": sum(len(one.failed) for one in found),
    }


def _print(found: Sequence[Checked], *, verbose: bool) -> None:
    for one in found:
        skipped = f", {one.num_skipped} skipped" if one.num_skipped else ""
        verdict = f"{len(one.failed)} FAILED" if one.failed else "ok"
        print(f"{one.subject:<40}{one.num_checks:>4} checks{skipped}: {verdict}")
        for failed in one.failed:
            times = f" ({failed.failed} times)" if failed.failed > 1 else ""
            print(f"    FAILED {failed.check}: {failed.reason}{times}")
            if verbose and failed.detail:
                print("\n".join(f"        {line}" for line in failed.detail.splitlines()))
        if verbose:
            for check_name, reason in one.skipped.items():
                print(f"    skipped {check_name}: {reason}")
    totals = report(found)
    num = sum(not one.subject.startswith("plugin ") for one in found)
    components = "1 component" if num == 1 else f"{num} components"
    print(f"checked {components}: {totals['checks']} checks, {totals['failed']} failed")
