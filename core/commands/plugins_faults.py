"""`plugins faults [overrides]`: what a failing plugin of each stage does to 32 running requests, as a table.

Runs on a tiny model made on the fly, unless `model.source=…` names one. Takes a few minutes: each block is 5 s.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path


def run(arguments: Sequence[str]) -> int:
    from core.lab.fault_table import as_table, fault_table
    from core.testing.tiny_models import make_tiny_model

    logging.disable(logging.CRITICAL)  # hundreds of injected faults, each with its traceback
    overrides = [argument for argument in arguments if argument != "--json"]
    with tempfile.TemporaryDirectory() as folder:
        if not any(override.startswith("model.source=") for override in overrides):
            overrides.append(f"model.source={make_tiny_model(Path(folder) / 'tiny')}")
        cells = asyncio.run(fault_table(overrides))
    if "--json" in arguments:
        print(json.dumps([{**asdict(cell), "problem": cell.problem} for cell in cells], indent=2))
    else:
        print(as_table(cells))
    return int(any(cell.problem for cell in cells))
