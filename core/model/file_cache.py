"""The folder where fetched model files live: one lock per model, atomic renames, checksums that are remembered."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.errors import ModelFileError
from core.progress import Progress

CHUNK = 1 << 20
RECORD_SUFFIX = ".nonet.json"
_FETCH_PREFIX = ".fetch-"


def default_cache_dir() -> Path:
    """`NONET_CACHE`, else `XDG_CACHE_HOME/nonet`, else `~/.cache/nonet`. Not created here."""
    if own := os.environ.get("NONET_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "nonet"


class FileRecord(msgspec.Struct, frozen=True):
    """Sidecar of a fetched file. `size` and `mtime_ns` say for which state of `path` the `sha256` was computed."""

    source: str
    path: str
    sha256: str
    size: int
    mtime_ns: int
    licence: str = ""

    def is_current(self, path: Path) -> bool:
        """The file at `path` has not been touched since its checksum was computed."""
        stat = path.stat()
        return (self.path, self.size, self.mtime_ns) == (str(path), stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One row of the `models` command. `checksum` is "ok", "changed", "missing" or "unknown" (no record beside the file)."""

    name: str
    source: str
    size: int  # bytes
    path: Path
    checksum: str
    licence: str = ""


def record_path(file: Path) -> Path:
    return file.with_name(file.name + RECORD_SUFFIX)


def read_record(path: Path) -> FileRecord | None:
    """None when the sidecar is absent or unreadable: the file is then hashed again."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=FileRecord)
    except (OSError, msgspec.DecodeError):
        return None


def write_record(path: Path, record: FileRecord) -> None:
    """Atomic, and best effort: a read-only cache costs a hash at each start, not the start."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_FETCH_PREFIX, delete=False) as out:
            out.write(msgspec.json.format(msgspec.json.encode(record)))
        os.replace(out.name, path)
    except OSError:
        return


def hash_file(path: Path, progress: Progress) -> str:
    """SHA-256 of a file, read in chunks."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(f"checking {path.name}", done, total)
    return digest.hexdigest()


def make_record(path: Path, source: str, sha256: str, licence: str) -> FileRecord:
    stat = path.stat()
    return FileRecord(source, str(path), sha256, stat.st_size, stat.st_mtime_ns, licence)


def checksum_matches(path: Path, sidecar: Path, expected: str, source: str, licence: str, progress: Progress) -> bool:
    """Whether `path` has SHA-256 `expected`; hashes only when the sidecar does not vouch for the file as it is now."""
    known = read_record(sidecar)
    if known is not None and known.sha256 == expected and known.is_current(path):
        return True
    if hash_file(path, progress) != expected:
        return False
    write_record(sidecar, make_record(path, source, expected, licence))
    return True


@contextmanager
def model_lock(folder: Path, progress: Progress) -> Iterator[None]:
    """One process at a time fills `folder`. Raises ModelFileError when the cache cannot be written."""
    lock = folder.with_name(folder.name + ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = lock.open("a")
    except OSError as error:
        raise ModelFileError(
            f"model cache {folder}: cannot be written ({error.strerror}); set NONET_CACHE to a folder you own"
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that fetches {folder.name}", 0, 0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


@contextmanager
def fetch_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder beside the target, so that the last step is a rename. Call with the lock held.

    What a killed process left here is stale by then, since the lock is ours.
    """
    for stale in folder.glob(f"{_FETCH_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True) if stale.is_dir() else stale.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_FETCH_PREFIX) as scratch:
        yield Path(scratch)


def _listed(file: Path, name: str, sidecar: Path) -> CachedModel:
    record = read_record(sidecar)
    if record is None:
        return CachedModel(name, "", file.stat().st_size, file, "unknown")
    path = Path(record.path)
    if not path.exists():
        return CachedModel(name, record.source, 0, path, "missing", record.licence)
    state = "ok" if record.is_current(path) else "changed"
    return CachedModel(name, record.source, path.stat().st_size, path, state, record.licence)


def list_models(cache_dir: Path) -> list[CachedModel]:
    """Fetched models, by name. Hashes nothing: "ok" means unchanged since the checksum was last computed."""
    root = cache_dir / "models"
    found: list[CachedModel] = []
    for folder in sorted(path for path in root.glob("*") if path.is_dir()):
        sidecars = {path for path in folder.rglob(f"*{RECORD_SUFFIX}") if path.is_file()}
        files = {path for path in folder.rglob("*.gguf") if not path.relative_to(folder).parts[0].startswith(".")}
        for file in sorted(files | {path.with_name(path.name.removesuffix(RECORD_SUFFIX)) for path in sidecars}):
            found.append(_listed(file, folder.name, record_path(file)))
    return found


def remove_model(cache_dir: Path, name: str, progress: Progress) -> int:
    """Delete a fetched model by name or source; returns the bytes freed. A file used in place (installed) stays.

    Raises ModelFileError when nothing has that name.
    """
    rows = [row for row in list_models(cache_dir) if name in (row.name, row.source)]
    if not rows:
        known = ", ".join(sorted({row.name for row in list_models(cache_dir)})) or "none"
        raise ModelFileError(f"model cache {cache_dir}: no model named {name!r}; cached: {known}")
    folder = cache_dir / "models" / rows[0].name
    with model_lock(folder, progress):
        freed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        shutil.rmtree(folder)
    return freed
