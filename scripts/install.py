"""Install Nonet into the virtual environment that runs this script, with a CPU build of torch where there is no GPU.

pip is asked for `torch==<version>+cpu` first. Where the index that pip is set up with has no such build, the plain one is
taken, which on Linux brings the CUDA libraries along (several GB). TORCH_SPEC overrides the choice: "torch==2.13.0".
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TORCH = "2.13.0"
ROOT = Path(__file__).resolve().parent.parent


def pip(*arguments: str) -> bool:
    return (
        subprocess.run([sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]).returncode
        == 0
    )


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def install_torch() -> bool:
    chosen = os.environ.get("TORCH_SPEC")
    if chosen:
        return pip(chosen)
    if not has_gpu():
        print(f"no GPU found: looking for a CPU build of torch {TORCH}", flush=True)
        if pip("-q", f"torch=={TORCH}+cpu"):
            return True
        print("pip sees no CPU build; taking the plain one. Point pip at torch's CPU wheels to save space.", flush=True)
    return pip(f"torch=={TORCH}")


def install_node_client() -> None:
    """The npm `openai` client for the tests; they skip its script where npm is missing."""
    npm = shutil.which("npm")
    if npm is not None and (ROOT / "tests/e2e/package.json").exists():
        subprocess.run(
            [npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"], cwd=ROOT / "tests/e2e"
        )


def main() -> int:
    if not install_torch():
        print("torch could not be installed; see pip's message above", file=sys.stderr)
        return 1
    if not pip("-q", "-e", f"{ROOT}[dev]"):
        print("Nonet could not be installed; see pip's message above", file=sys.stderr)
        return 1
    install_node_client()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
