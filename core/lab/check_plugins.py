"""What needs minutes of the plugin contract: `python -m core.lab.check_plugins [PIECE …]`, all pieces without arguments.

Each piece prints its table; the last line has the figures of all, and the exit code is 1 where one of them fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from core.lab.bad_plugins import ROOT, Caught, check_seeds, seeds
from core.lab.pieces import Outcome, main
from core.lab.quiet import quiet

BUILTINS_TIMEOUT_S = 1800.0
MAX_GROWTH = 0.05  # of the framework's own time per step, by five observers and three logits processors


def bad_plugins() -> Outcome:
    """Every seeded bad plugin is caught, each by the check that it names."""
    found: list[Caught] = []
    for caught in check_seeds(seeds()):
        found.append(caught)
        others = ", ".join(check for check in caught.by if check != caught.expected)
        verdict = "caught" if caught.caught else "NOT CAUGHT"
        print(f"{caught.name:<44}{verdict:<12}{caught.expected}{f' (and {others})' if others else ''}", flush=True)
        if not caught.caught:
            print("\n".join(f"    {check}: {reason}" for check, reason in caught.by.items()), flush=True)
    num_caught = sum(caught.caught for caught in found)
    return Outcome(num_caught == len(found), f"bad plugins {num_caught}/{len(found)} caught by the check they name")


def builtins() -> Outcome:
    """No check has anything to say of what is built in."""
    done = subprocess.run(
        [sys.executable, "-m", "core", "plugins", "check", "--builtins", "--json"],
        cwd=ROOT,
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=BUILTINS_TIMEOUT_S,
    )
    if done.returncode not in (0, 1):
        return Outcome(False, f"built-ins: {done.stderr.strip()}")
    report: dict[str, Any] = json.loads(done.stdout)
    for one in report["components"]:
        for failed in one["failed"]:
            print(f"{one['subject']}: {failed['check']}: {failed['reason']}")
    figures = f"built-ins {report['failed']} false alarms in {report['checks']} checks of {len(report['components'])}"
    return Outcome(done.returncode == 0, figures)


def faults() -> Outcome:
    """A failing plugin of any stage hurts nobody but the request that it touched."""
    from core.lab.fault_table import NUM_REQUESTS, as_table, fault_table
    from core.testing.tiny_models import make_tiny_model

    with tempfile.TemporaryDirectory() as folder, quiet():
        cells = asyncio.run(fault_table([f"model.source={make_tiny_model(Path(folder) / 'tiny')}"]))
    print(as_table(cells))
    good = sum(not cell.problem for cell in cells)
    equal, others = sum(cell.others_equal for cell in cells), len(cells) * (NUM_REQUESTS - 1)
    return Outcome(good == len(cells), f"faults {good}/{len(cells)} as promised, {equal}/{others} others unhurt")


def refusals() -> Outcome:
    """A config that cannot work is refused at once, and the model's file stays closed."""
    from core.lab.refusals import refusals as all_refusals

    found = all_refusals()
    for one in found:
        print(f"{one.seconds:5.2f} s  {' '.join(one.overrides):<60}{one.problem or 'refused'}")
    good, slowest = sum(not one.problem for one in found), max(one.seconds for one in found)
    return Outcome(good == len(found), f"refusals {good}/{len(found)}, slowest {slowest:.2f} s")


def cost() -> Outcome:
    """Five observers and three logits processors leave the framework's own time per step as it is."""
    from core.lab.plugin_cost import as_line, run

    with tempfile.TemporaryDirectory() as folder, quiet():
        found = run(["+preset=chat"], Path(folder))
    print(as_line(found))
    return Outcome(found.growth < MAX_GROWTH, f"cost {found.growth:+.1%} of {found.plain_ms:.2f} ms per step")


PIECES: Mapping[str, Callable[[], Outcome]] = {
    piece.__name__: piece for piece in (refusals, cost, faults, builtins, bad_plugins)
}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], PIECES, "plugins"))
