"""Make this package yours: `python rename.py acme-turns` in a copy of the folder, once. Then delete this file.

"acme-turns" becomes the distribution, `acme_turns` the package, and the last word, `turns`, the name of the plugin, of
the component, its config and its class (`Turns`).
"""

import re
import sys
from pathlib import Path

SUFFIXES = {".py", ".toml", ".md", ".yaml"}
CITED = '"Lottery Scheduling"'  # the title of a paper keeps its words
SKIPPED = re.compile(r"\..*|__pycache__|build|dist|.*\.egg-info")


def main(distribution: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z][a-z0-9]*)+", distribution):
        raise SystemExit(f"{distribution!r}: write two or more words of small letters joined by '-', as in acme-turns")
    package, word = distribution.replace("-", "_"), distribution.rpartition("-")[2]
    new = {"nonet_lottery": package, "nonet-lottery": distribution, "lottery": word, "Lottery": word.capitalize()}
    new["NONET_LOTTERY"] = package.upper()
    new[CITED] = CITED
    pattern = re.compile("|".join(sorted(new, key=len, reverse=True)))
    folder = Path(__file__).resolve().parent
    for path in sorted(folder.rglob("*"), reverse=True):  # what is inside a folder comes before the folder
        if any(SKIPPED.fullmatch(part) for part in path.relative_to(folder).parts):
            continue
        if path.suffix in SUFFIXES and path != Path(__file__).resolve():
            text = path.read_text(encoding="utf-8")
            path.write_text(pattern.sub(lambda found: new[found[0]], text), encoding="utf-8")
        path.rename(path.with_name(pattern.sub(lambda found: new[found[0]], path.name)))
    print(f"now: pip install -e '.[dev]' && pytest && nonet plugins   # shows {word} from {distribution}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
