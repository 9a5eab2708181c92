"""Fetches a checkpoint from the Hugging Face Hub: decides which files of a repository are needed, and downloads them.

The download is done by ``huggingface_hub``, with its cache, token, progress bars and environment variables. The library
is imported only for a Hub id, because the import alone takes longer than ``reshard --help`` may take.
"""

from __future__ import annotations

import errno
import gc
import glob
import logging
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from formats.documents import MAX_INDEX, json_object, read_document
from formats.errors import CheckpointError
from formats.files.foreign import is_usable, refuse_foreign
from formats.mesh import RANK_FOLDER

# Weights of other frameworks or in other formats, archives and pictures. All other files are small and may be needed
# (tokenizers, chat templates, licences, custom code), and their names cannot be listed in advance.
# fmt: off
_NOT_SIDE_FILES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ggml",
    ".tflite", ".ot", ".mlmodel", ".nemo", ".engine", ".pkl", ".pickle", ".npy", ".npz", ".parquet", ".arrow",
    ".zip", ".tar", ".gz", ".tgz", ".zst", ".7z", ".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".bmp", ".mp4",
    ".mov", ".webm", ".wav", ".mp3", ".flac", ".pdf",
)
# fmt: on
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HTTP_LIBRARIES = ("httpx2", "httpx", "requests", "urllib3")  # huggingface_hub uses one of these
_FIRST_READ = 100_000  # bytes; most safetensors headers are shorter
_MAX_HEADER = 100_000_000  # bytes; the safetensors library's own limit
_ATTEMPTS = 3
_TIMEOUT = 30.0  # seconds for a header to arrive


@dataclass(frozen=True)
class Fetched:
    """The folder of a source on this machine, and its Hub id and commit if it came from the Hub."""

    path: Path
    repo: str | None = None
    commit: str | None = None
    headers_only: bool = False
    """The safetensors files are sparse, with true headers and sizes but no data: enough for planning only."""


@dataclass(frozen=True)
class _Request:
    """A repository, a revision, and the options of the download."""

    repo: str
    revision: str | None
    token: str | None
    cache_dir: Path | None
    quiet: bool

    def snapshot(self, files: Iterable[str], *, revision: str | None = None, local: bool = False) -> Path:
        """Download the named files unless the cache has them; returns the commit's folder in the cache."""
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            self.repo,
            revision=revision or self.revision,
            token=self.token,
            cache_dir=self.cache_dir,
            allow_patterns=[glob.escape(name) for name in files],
            local_files_only=local,
            library_name="reshard",
        )
        return Path(folder)


def fetch(
    source: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    headers_only: bool = False,
    quiet: bool = False,
) -> Fetched:
    """The folder of ``source``: an existing path as it is, or a Hub repository after its download.

    Only the needed files are downloaded, into ``huggingface_hub``'s cache; ``path`` is then a snapshot folder there. If
    a repository has safetensors, no other weights are downloaded. If the Hub cannot be reached, a complete copy in the
    cache is used. With ``headers_only`` the safetensors files are sparse, with true headers and sizes, unless the cache
    has the full ones; a repository without safetensors is downloaded in full even then.

    Raises CheckpointError if the path or repository does not exist or may not be read, the download fails, or the disk
    is too small.
    """
    path = Path(source).expanduser()
    if source and path.exists():
        return Fetched(path)
    if path.is_symlink():
        raise CheckpointError(f"{source} is a link to {path.readlink()}, which is not there")
    if not _may_be_repo(source):
        raise CheckpointError(f"no such folder: {source or '(empty)'}", _hint_for_path(source))
    request = _Request(source, revision, token, cache_dir, quiet)
    with _as_told(quiet):
        try:
            return _download(request, headers_only)
        except CheckpointError:
            raise
        except Exception as error:
            raise _explain(error, request) from error


# --- which files ---------------------------------------------------------------------------------------------------


def side_files(listing: Iterable[str]) -> list[str]:
    """The files of a checkpoint's repository that are not weights: config, tokenizer, index, licence."""
    listing = list(listing)
    return sorted(
        name
        for name in listing
        if _belongs(name, listing)
        and not name.lower().endswith(_NOT_SIDE_FILES)
        and (not name.endswith(".index.json") or name in _indices(listing))
    )


def weight_files(listing: Iterable[str], folder: Path) -> list[str]:
    """The weight files of a repository: safetensors if there are any, else ``.bin``, else Meta's ``.pth``.

    If there is an index, only the files that it names. ``folder`` has the side files. Copies of the weights under other
    names (``consolidated.safetensors``, a variant of another dtype) are left out. An unreadable index is ignored here:
    opening the checkpoint reports it.
    """
    listing = [name for name in listing if _belongs(name, listing)]
    indices = _indices(listing)
    tensors = [name for name in listing if name.endswith(".safetensors")]
    if _is_split(listing):
        return sorted(tensors)
    named = {file for index in indices for file in _named_by_index(folder / index)}
    whole = {"model.safetensors", "pytorch_model.bin"} & set(tensors or listing)
    if named or whole:
        return sorted(named | whole)
    bins = [name for name in listing if re.fullmatch(r"pytorch_model.*\.bin", name)]
    return sorted(tensors or bins or [name for name in listing if re.fullmatch(r"consolidated\.\d+\.pth", name)])


def _belongs(name: str, listing: Iterable[str]) -> bool:
    """Whether a file is part of the checkpoint, not a copy for another program (``original/``, ``onnx/``)."""
    if name.startswith("."):
        return False
    return "/" not in name or name.startswith("additional_chat_templates/") or _is_split(listing)


def _is_split(listing: Iterable[str]) -> bool:
    """Whether a repository has shards that ``reshard split`` wrote."""
    return any(name == "reshard.json" or RANK_FOLDER.fullmatch(name.partition("/")[0]) for name in listing)


def _indices(listing: Iterable[str]) -> list[str]:
    """The index files of the weights that are used."""
    listing = list(listing)
    if _is_split(listing):
        return [name for name in listing if name.endswith(".safetensors.index.json")]
    has_safetensors = any(name.endswith(".safetensors") and "/" not in name for name in listing)
    index = "model.safetensors.index.json" if has_safetensors else "pytorch_model.bin.index.json"
    return [index] if index in listing else []


def _named_by_index(index: Path) -> set[str]:
    try:
        _, content = read_document(index, MAX_INDEX, json_object)
    except CheckpointError:
        return set()
    found = content.get("weight_map")
    return {name for name in found.values() if isinstance(name, str)} if isinstance(found, dict) else set()


def _is_needed_to_plan(name: str) -> bool:
    return name.endswith(("config.json", ".index.json", "reshard.json"))


# --- the download --------------------------------------------------------------------------------------------------


def _download(request: _Request, headers_only: bool) -> Fetched:
    """List the repository, then download the side files, then the weights that these name."""
    from huggingface_hub import HfApi

    api = HfApi(token=request.token, library_name="reshard")
    try:
        info = api.model_info(request.repo, revision=request.revision, files_metadata=True)
    except Exception as error:
        if not _is_outage(error):
            raise
        return _from_cache(request, headers_only, error)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    side = side_files(sizes)
    if headers_only:
        side = [name for name in side if _is_needed_to_plan(name)]
    with _bars_off():
        folder = request.snapshot(side)  # by the revision's name, so that the cache knows this name offline
    weights = weight_files(sizes, folder)
    if not any(is_usable(name, sizes) for name in weights):
        refuse_foreign(request.repo, sizes)
    if not weights:
        raise CheckpointError(
            f"{request.repo} holds no checkpoint: no .safetensors, pytorch_model*.bin or consolidated.*.pth at its top",
            "give a repository of a model that transformers can load",
        )
    missing = [name for name in weights if not (folder / name).exists()]
    if missing and headers_only and all(name.endswith(".safetensors") for name in weights):
        return Fetched(_fetch_headers(request, side, weights, folder), request.repo, folder.name, headers_only=True)
    if missing:
        _check_space(request, folder, sum(sizes.get(name, 0) for name in missing))
        _say(request, f"downloading {_count(missing)} of {request.repo}, {_gigabytes(sizes, missing)}")
        _persist(request, weights, folder.name)
        gc.collect()  # huggingface_hub leaves progress bars open; deleted, they end their lines
    return Fetched(folder, request.repo, folder.name)


def _persist(request: _Request, files: list[str], commit: str) -> None:
    """Download ``files``; try again after a lost connection while the Hub still answers.

    ``huggingface_hub`` itself resumes after a server closed the connection, but not after a reset.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            request.snapshot(files, revision=commit)
            return
        except Exception as error:
            if attempt == _ATTEMPTS or not _is_outage(error) or not _answers(request):
                raise


def _answers(request: _Request) -> bool:
    """Whether the Hub answers after one second."""
    from huggingface_hub import HfApi

    time.sleep(1)
    try:
        HfApi(token=request.token).model_info(request.repo)
    except Exception:
        return False
    return True


def _from_cache(request: _Request, headers_only: bool, error: Exception) -> Fetched:
    """The copy in the cache, if it is complete; else raises ``error``, the reason why the Hub cannot be used."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = request.snapshot(["config.json"], local=True)
    except LocalEntryNotFoundError:
        raise error from error.__cause__
    listing = _cached_listing(request, folder)
    weights = weight_files(listing, folder)
    whole = bool(weights) and all((folder / name).exists() for name in [*weights, *side_files(listing)])
    stand_in = _headers_folder(request, folder.name)
    if not whole and not (headers_only and stand_in.exists()):
        raise error
    if not isinstance(error, OfflineModeIsEnabled):
        _say(request, f"the Hub cannot be reached; using {request.repo} at {folder.name[:12]} from the cache")
    return Fetched(folder if whole else stand_in, request.repo, folder.name, headers_only=not whole)


def _cached_listing(request: _Request, folder: Path) -> list[str]:
    """The names of all files of the commit, if ``huggingface_hub`` cached them; else of the files in the folder."""
    try:
        from huggingface_hub import get_cached_repo_tree  # huggingface_hub 2 and later

        tree = get_cached_repo_tree(request.repo, revision=folder.name, cache_dir=request.cache_dir)
        return [entry.path for entry in tree]
    except Exception:  # no such function, or no such list
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()]


def _check_space(request: _Request, folder: Path, needed: int) -> None:
    """Raise CheckpointError if the disk is too small for ``needed`` bytes; unfinished downloads count as done."""
    begun = sum(path.stat().st_size for path in (folder.parent.parent / "blobs").glob("*.incomplete"))
    free = shutil.disk_usage(folder).free
    if needed - begun > free:
        raise CheckpointError(
            f"not enough space for {request.repo} in {folder.parent.parent.parent}: "
            f"{needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free",
            "free some space, or give another place with --cache-dir (or HF_HOME)",
        )


# --- headers -------------------------------------------------------------------------------------------------------


def _fetch_headers(request: _Request, side: list[str], weights: list[str], snapshot: Path) -> Path:
    """A copy of ``snapshot`` with sparse weight files that have true headers; made once per commit."""
    final = _headers_folder(request, snapshot.name)
    if final.exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f"{final.name}.") as scratch:
        building = Path(scratch) / "files"
        for name in [*side, *weights]:
            (building / name).parent.mkdir(parents=True, exist_ok=True)
        for name in side:
            shutil.copyfile(snapshot / name, building / name)
        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(lambda name: _fetch_header(request, snapshot.name, name, building / name), weights):
                pass
        try:
            building.rename(final)
        except OSError:  # another process has just made the same folder
            if not final.exists():
                raise
    return final


def _fetch_header(request: _Request, commit: str, name: str, target: Path) -> None:
    """Write the header of a safetensors file of the Hub to ``target``, and give it the file's full size."""
    data, size = _read_range(request, commit, name, 0, _FIRST_READ)
    end = 8 + int.from_bytes(data[:8], "little")
    if not 8 < end <= min(size, _MAX_HEADER):
        raise CheckpointError(
            f"{request.repo}: {name} is not a safetensors file, or is cut off: the header does not fit",
            "ask the repository's owner to upload it again",
        )
    if end > len(data):
        data += _read_range(request, commit, name, len(data), end)[0]
    with target.open("wb") as file:
        file.write(data[:end])
        file.truncate(size)


def _read_range(request: _Request, commit: str, name: str, start: int, stop: int) -> tuple[bytes, int]:
    """Bytes ``start`` to ``stop`` of a file of the Hub, fewer if it ends before, and the file's size in bytes."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    headers = build_hf_headers(token=request.token, library_name="reshard")
    headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    response = get_session().get(hf_hub_url(request.repo, name, revision=commit), headers=headers, timeout=_TIMEOUT)
    hf_raise_for_status(response)
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    if response.status_code != 206 or not total.isdigit():
        raise CheckpointError(
            f"{request.repo}: the server does not send parts of {name}, so its header cannot be read alone",
            "download the repository first (hf download), then run the same command again",
        )
    return bytes(response.content), int(total)


def _headers_folder(request: _Request, commit: str) -> Path:
    from huggingface_hub import constants

    assets = request.cache_dir / "assets" if request.cache_dir else Path(constants.HF_ASSETS_CACHE)
    return assets / "reshard" / "headers" / request.repo.replace("/", "--") / commit


# --- local path or repository --------------------------------------------------------------------------------------


def _may_be_repo(source: str) -> bool:
    """Whether ``source`` has the form of a Hub id (``name`` or ``org/name``)."""
    if not source or source[0] in "./~" or source.endswith("/") or source.count("/") > 1 or "\\" in source:
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return True


def _hint_for_path(source: str) -> str:
    found = re.match(r"(?:https?|hf)://(?:[^/]*\.[^/]*/)?(?:models/)?([\w.-]+/[\w.-]+)", source)
    if found:
        return f"give the Hub id alone: {found[1]}"
    if "@" in source:
        return "give a folder, or a Hub id like org/name with --revision"
    return "give a folder that exists, or a Hub id like org/name"


# --- errors --------------------------------------------------------------------------------------------------------


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_outage(error: BaseException) -> bool:
    """Whether the Hub was not reached, broke off or failed; False if it refused the request."""
    from huggingface_hub.errors import HfHubHTTPError

    for cause in _causes(error):
        if isinstance(cause, HfHubHTTPError):
            return _status(cause) >= 500
        if isinstance(cause, ConnectionError | TimeoutError) or type(cause).__module__.split(".")[0] in _HTTP_LIBRARIES:
            return True
    return False


def _explain(error: Exception, request: _Request) -> CheckpointError:
    """The error to show to the user for a failed download."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    repo, at = request.repo, f" at revision {request.revision}" if request.revision else ""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL:
            return CheckpointError(
                f"no space left (or a quota reached) while downloading {repo}",
                "free some space, or give another place with --cache-dir (or HF_HOME), then run the same command again",
            )
        if isinstance(cause, HfHubHTTPError) and not _is_outage(cause):
            return _explain_refusal(cause, request)
        if isinstance(cause, OfflineModeIsEnabled):
            return CheckpointError(
                f"{repo}{at} is no folder here and not (or not wholly) in the Hub's cache, and HF_HUB_OFFLINE is set",
                "unset HF_HUB_OFFLINE, or download it where there is a network: the cache can be copied",
            )
    if _is_outage(error):
        return CheckpointError(
            f"no folder {repo} is here, and the connection to the Hub ({constants.ENDPOINT}) failed while fetching "
            f"{repo}{at}: {_first_line(error)}",
            "check the network, then run the same command again: files that are complete are not downloaded twice",
        )
    return CheckpointError(
        f"fetching {repo}{at} from the Hub failed: {_first_line(error)}",
        "run the same command again: files that are complete are not downloaded twice",
    )


def _explain_refusal(error: Exception, request: _Request) -> CheckpointError:
    """The error to show to the user for a refusal by the Hub."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    repo, page = request.repo, f"{constants.ENDPOINT}/{request.repo}"
    status = _status(error)
    log_in = "give a token with --token (or HF_TOKEN), or run `hf auth login`"
    if isinstance(error, GatedRepoError):
        return CheckpointError(
            f"{repo} is gated: access is for those who accepted its terms", f"accept them at {page}, then {log_in}"
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(
            f"{repo} has no revision {request.revision}",
            "give a branch, a tag or a full commit hash, or leave --revision out",
        )
    if isinstance(error, RepositoryNotFoundError):
        return CheckpointError(
            f"no folder {repo} here, and no repository of that name on the Hub (or a private one)",
            f"check the name; for a private repository {log_in}",
        )
    if status in (401, 403):
        return CheckpointError(f"the Hub refuses access to {repo} with this token ({status})", f"{log_in}; see {page}")
    if status == 429:
        return CheckpointError(f"the Hub refuses {repo} for now: too many requests (429)", f"wait a while, or {log_in}")
    return CheckpointError(f"the Hub did not deliver {repo}: {_first_line(error)}", "run the same command again later")


def _status(error: BaseException) -> int:
    """The HTTP status of the Hub's answer; 0 without an answer."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# --- what is shown -------------------------------------------------------------------------------------------------


@contextmanager
def _as_told(quiet: bool) -> Iterator[None]:
    """Show progress bars only on a terminal; with ``quiet`` neither bars nor warnings of ``huggingface_hub``."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    if quiet:
        logger.setLevel(logging.ERROR)
    try:
        if quiet or not sys.stderr.isatty():
            with _bars_off():
                yield
        else:
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _bars_off() -> Iterator[None]:
    """Turn off the progress bars of ``huggingface_hub``, unless HF_HUB_DISABLE_PROGRESS_BARS decides."""
    from huggingface_hub import constants
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _say(request: _Request, line: str) -> None:
    if not request.quiet:
        print(line, file=sys.stderr, flush=True)


def _count(files: list[str]) -> str:
    return f"{len(files)} file{'s' if len(files) != 1 else ''}"


def _gigabytes(sizes: dict[str, int], files: list[str]) -> str:
    return f"{sum(sizes.get(name, 0) for name in files) / 1e9:.2f} GB"
