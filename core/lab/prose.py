"""English prose to read: long, under a free licence, and the same everywhere.

The proceedings of a workshop of the Library of Congress (Workshop on Electronic Texts, 1992; Project Gutenberg, in the public
domain), which the Canterbury corpus has as `lcet10.txt`, and the sdist of Brotli among its tests (google/brotli, MIT). It is
fetched for a check and never kept.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from core.errors import NonetError

SDIST = "brotli"
VERSION = "1.2.0"
SHA256 = "e310f77e41941c13340a95976fe66a8a95b01e783d430eeaf7a2f87e0a57dd0a"
MEMBER = f"{SDIST}-{VERSION}/tests/testdata/lcet10.txt"

# For smoke tests, which fetch nothing.
SENTENCES = (
    "The lighthouse keeper wrote down the weather every morning.",
    "In 1898 the harbour froze, and 27 ships waited for spring!",
    "def area(r):\n    return 3.14159 * r ** 2\n",
    "Das Schiff fährt um 14:30 Uhr nach Göteborg; niemand weiß, warum.",
    '{"name": "keeper", "age": 61, "lamps": [1, 2, 3]}',
    "Nobody asked why the lamp burned blue — until the night of the storm.",
    "灯塔在海边。 Ďábelské kódy, ครับ, 🔥🔥.",
    "First, oil the hinges. Second, trim the wick. Third, wind the clock.",
)


def passage(num_sentences: int, first: int = 0) -> str:
    """A text without repeats, of about 16 tokens a sentence."""
    parts = (f"{n + 1}. {SENTENCES[(first + n) % len(SENTENCES)]}" for n in range(num_sentences))
    return " ".join(parts)


def fetched_prose() -> str:
    """By pip from the package index. Raises NonetError where it cannot be had, or is not what it was."""
    with TemporaryDirectory() as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(f"{SDIST}=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", SDIST, "--require-hashes"]
        done = subprocess.run([*pip, "--dest", folder, "-r", str(wanted)], capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise NonetError(f"the text {SDIST}=={VERSION} cannot be fetched: {done.stderr.strip()[-500:]}")
        return read_prose(next(Path(folder).glob("*.tar.gz")))


def read_prose(archive: Path) -> str:
    """Its paragraphs, without the line breaks in them. Raises KeyError where the archive has no such text."""
    with tarfile.open(archive) as packed:
        file = packed.extractfile(MEMBER)
        if file is None:
            raise KeyError(f"{archive.name}: {MEMBER} is no file")
        return unwrapped(file.read().decode())


def unwrapped(text: str) -> str:
    """A line for each paragraph, and an empty one between them."""
    lines = (line.strip() for line in text.splitlines())
    paragraphs = "\n".join(lines).split("\n\n")
    return "\n\n".join(" ".join(one.split()) for one in paragraphs if one.strip())
