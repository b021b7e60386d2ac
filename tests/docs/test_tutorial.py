"""docs/tutorial.md, block by block, in a fresh environment: files are written, commands run, and what they say is there.

A `python` block begins with the file that it is; a `text` block is what the command above it says, line by line, in order.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from core.testing.harness.site import ENVIRON, ROOT, Site, build_nonet

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]

PAGE = ROOT / "docs/tutorial.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tutorial")
    site = Site.make(folder, [build_nonet(folder)])
    # the environment has no pip and no pytest of its own: those of this one, without a package index
    shims = {
        "pip": f'exec {sys.executable} -m pip --python {site.python} "$@" --no-build-isolation --no-index',
        "pytest": f'exec {site.python} -m pytest -p no:cacheprovider "$@"',
    }
    for name, line in shims.items():
        (site.venv / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (site.venv / "bin" / name).chmod(0o755)
    return site


def shell(site: Site, script: str, cwd: Path) -> tuple[str, Path]:
    """What it says, and where it ends up."""
    environ = {**ENVIRON, "PATH": f"{site.venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = f'set -eu\n{script}\necho; echo "cwd=$(pwd)"'
    done = subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    said, _, path = done.stdout.rpartition("cwd=")
    return said + done.stderr, Path(path.strip())


def test_every_block_of_the_tutorial_works(site):
    cwd, said, num_run = site.work, "", 0
    for language, text in BLOCK.findall(PAGE.read_text("utf-8")):
        if language == "python":
            name, _, source = text.partition("\n")
            path = cwd / name.removeprefix("# ")
            assert path.exists(), (
                f"{path}: the package written by `plugins new` has this file, and the page replaces it"
            )
            path.write_text(source, encoding="utf-8")
        elif language == "bash":
            said, cwd = shell(site, text, cwd)
            num_run += 1
        else:
            assert language == "text"
            for line in text.splitlines():
                assert line in said, f"{line!r} is not in\n{said}"
    assert num_run >= 7
