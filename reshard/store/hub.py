"""Fetches a checkpoint from the Hugging Face Hub: decides which files of a repository are needed, and downloads them.

The download is done by ``huggingface_hub``, with its cache, token, progress bars and environment variables. The library
is imported only for a Hub id, because the import alone takes longer than ``reshard --help`` may take.
"""

from __future__ import annotations

import difflib
import errno
import gc
import glob
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from reshard.formats.errors import CheckpointError
from reshard.formats.hub_cache import begun_bytes, cache_of
from reshard.formats.plugins import plugins
from reshard.store.bucket import fetch_stored
from reshard.store.range_store import FileContent, RangeStore, kept_in, with_headers
from reshard.store.remote import (
    FIRST_CONTACT,
    RefusedError,
    Remote,
    first_line,
    open_store,
    patience,
    patiently,
    read_range,
)
from reshard.store.selection import HubAccess, Weights, is_url, select, side_files, weight_files
from reshard.system import check_space
from reshard.text import plural

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HTTP_LIBRARIES = ("httpx2", "httpx", "requests", "urllib3")  # huggingface_hub uses one of these
_ADDRESSES = 8
"""So many addresses of a file are asked for before it is given up."""


@dataclass(frozen=True)
class HubFile(Remote):
    """A file of a Hub repository at a commit.

    The Hub redirects to a signed address that expires. The address is asked for once, and again when it is refused.
    """

    repo: str
    name: str
    commit: str
    size: int
    etag: str
    token: str | None = field(default=None, repr=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)
    _stores: list[ObjectStore] = field(default_factory=list, init=False, repr=False, compare=False)
    """The last is at the address in use."""

    @property
    def identity(self) -> str:
        """The etag, as the Hub's cache has it."""
        return self.etag

    @property
    def address(self) -> str:
        """Repository and name."""
        return f"{self.repo}/{self.name}"

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes of it; the first read asks the Hub where the file lies."""
        store: ObjectStore | None = None
        for _ in range(_ADDRESSES):
            with self._lock:
                if not self._stores or self._stores[-1] is store:  # the address has expired
                    self._stores.append(self._located())
                store = self._stores[-1]
            with suppress(RefusedError):
                return read_range(store, "", start, stop, None, self.address)
        raise RefusedError(
            f"the Hub refuses {self.address} again and again, under new addresses too",
            "give a token with --token (or HF_TOKEN), or download the repository with --download",
        )

    def _located(self) -> ObjectStore:
        """The store at the address of the content. Raises CheckpointError."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(self.repo, self.name, revision=self.commit)
        request, seconds = partial(get_hf_file_metadata, url, token=self.token, library_name="reshard"), patience()
        try:
            location = patiently(request, _may_pass, seconds).location
        except Exception as error:
            raise _explain(error, _Request(self.repo, HubAccess(revision=self.commit, token=self.token))) from error
        ours = location.partition("?")[0] == url.partition("?")[0]
        headers = build_hf_headers(token=self.token, library_name="reshard") if ours else {}
        return open_store(location, headers, once=True)


class _Request(NamedTuple):
    """A repository, and how it is reached."""

    repo: str
    access: HubAccess

    def snapshot(self, files: Iterable[str], *, revision: str | None = None, local: bool = False) -> Path:
        """Download the named files unless the cache has them; returns the commit's folder in the cache."""
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            self.repo,
            revision=revision or self.access.revision,
            token=self.access.token,
            cache_dir=self.access.cache_dir,
            allow_patterns=[glob.escape(name) for name in files],
            local_files_only=local,
            library_name="reshard",
        )
        return Path(folder)


def fetch(source: str, access: HubAccess, weights: Weights = Weights.FILES) -> RangeStore:
    """The store of a Hub repository or a URL, which is no folder here.

    From the Hub only the needed files are downloaded, into ``huggingface_hub``'s cache, where the store reads them. If
    a repository has safetensors, no other weights are downloaded. If the Hub cannot be reached, a complete copy in the
    cache is used. Weights are read by ranges, unless the cache has all of them or ``weights`` asks for files; ``.bin``
    files are always downloaded.

    Raises CheckpointError if the repository does not exist or may not be read, the download fails, or the disk is too
    small; or if a revision is asked of what has none.
    """
    path = Path(source)
    scheme = source.partition("://")[0] if "://" in source and not is_url(source) else ""
    is_added = bool(scheme) and scheme in plugins("stores")
    is_elsewhere = is_added or (is_url(source) and not re.match(r"https?://(www\.)?(huggingface\.co|hf\.co)/", source))
    if access.revision is not None and (is_elsewhere or (source and os.path.lexists(path))):
        where = "at a URL" if is_elsewhere else "on this machine"
        message = f"{source} is {where}: there is no revision {access.revision} of it"
        raise CheckpointError(message, "leave out --revision")
    if is_added:
        return RangeStore(source, plugins("stores")[scheme](source))
    if is_elsewhere:
        return fetch_stored(source, weights, assets_folder(access.cache_dir))
    if os.path.lexists(path) and path.is_symlink():
        raise CheckpointError(f"{source} is a link to {path.readlink()}, which is not there")
    meant = _meant(path) if source and access.revision is None else ""
    if not _may_be_repo(source):
        raise CheckpointError(f"no such folder: {source or '(empty)'}", meant or _hint_for_path(source))
    if meant:
        raise CheckpointError(
            f"no such folder: {source}", f"{meant} If it is a repository of the Hub, give it with --revision main"
        )
    request = _Request(source, access)
    with _as_told(access.quiet):
        try:
            return _download(request, weights)
        except CheckpointError:
            raise
        except Exception as error:
            raise _explain(error, request) from error


def assets_folder(cache_dir: Path | None) -> Path:
    """Return the folder for files that belong to no Hub repository: in ``cache_dir``, or the one of the Hub's
    library.
    """
    if cache_dir is not None:
        return cache_dir / "assets"
    from huggingface_hub import constants

    return Path(constants.HF_ASSETS_CACHE)


# --- the download --------------------------------------------------------------------------------------------------


def _download(request: _Request, scope: Weights) -> RangeStore:
    """List the repository, then download the side files, then the weights that these name."""
    from huggingface_hub import HfApi

    api = HfApi(token=request.access.token, library_name="reshard")
    try:
        ask = partial(api.model_info, request.repo, revision=request.access.revision, files_metadata=True)
        info = patiently(ask, _is_busy, min(patience(), FIRST_CONTACT))
    except Exception as error:
        if not _is_outage(error):
            raise
        return _from_cache(request, scope, error)
    siblings = {file.rfilename: file for file in info.siblings or []}
    sizes = {name: file.size or 0 for name, file in siblings.items()}

    commits: list[str | None] = [None]  # first by the revision's name, so that the cache knows this name offline

    def copy(side: list[str]) -> Path:
        with _bars_off():
            copied = patiently(lambda: request.snapshot(side, revision=commits[-1]), _may_pass, patience())
        commits.append(copied.name)
        return copied

    hint = "give a repository of a model that transformers can load"
    folder, side, weights, by_ranges = select(request.repo, sizes, scope, copy, hint)
    missing = [name for name in weights if not (folder / name).exists()]
    files: dict[str, FileContent] = {name: folder / name for name in (*side, *weights)}
    if by_ranges:
        for file in (siblings[name] for name in missing):
            etag = (file.lfs.sha256 if file.lfs else file.blob_id) or f"{folder.name}:{file.rfilename}"  # as the cache
            remote = HubFile(request.repo, file.rfilename, folder.name, file.size or 0, etag, request.access.token)
            files[file.rfilename] = remote
    elif missing:
        needed = sum(sizes.get(name, 0) for name in missing)  # unfinished downloads count as done
        hint = "give another place with --cache-dir (or HF_HOME)"
        check_space(cache_of(folder), needed - begun_bytes(folder), request.repo, hint)
        _say(request, f"downloading {plural(len(missing), 'file')} of {request.repo}, {needed / 1e9:.2f} GB")
        patiently(lambda: request.snapshot(weights, revision=folder.name), _may_pass, patience())
        gc.collect()  # huggingface_hub leaves progress bars open; deleted, they end their lines
    others = tuple(sorted(sizes.keys() - files.keys()))
    store = RangeStore(request.repo, files, commit=folder.name, others=others, folder=folder)
    return with_headers(store, _headers_folder(request, folder.name, scope), sampled=scope is Weights.RANGES)


def _from_cache(request: _Request, scope: Weights, error: Exception) -> RangeStore:
    """The copy in the cache, if it is complete; else raises ``error``, the reason why the Hub cannot be used."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = request.snapshot(["config.json"], local=True)
    except LocalEntryNotFoundError:
        raise error from error.__cause__
    listing = _cached_listing(request, folder)

    def read(document: str) -> bytes | None:
        return (folder / document).read_bytes() if (folder / document).is_file() else None

    weights, side = weight_files(listing, folder), side_files(listing, read)
    files: dict[str, FileContent] = {name: folder / name for name in (*weights, *side) if (folder / name).exists()}
    headers = _headers_folder(request, folder.name, Weights.HEADERS)
    wanted = {*side} if scope is Weights.NONE else {*weights, *side}
    whole = bool(weights or scope is Weights.NONE) and len(files) >= len(wanted)
    kept = kept_in(headers) if scope is Weights.HEADERS and not whole else {}
    if not whole and not kept:
        raise error
    for name, (size, _) in kept.items():  # of which the header is kept
        files.setdefault(name, HubFile(request.repo, name, folder.name, size, "", request.access.token))
    store = RangeStore(request.repo, files, commit=folder.name, others=None, folder=folder)
    if not isinstance(error, OfflineModeIsEnabled):
        _say(request, f"the Hub cannot be reached; using {request.repo} at {folder.name[:12]} from the cache")
    return with_headers(store, headers, sampled=False)


def _cached_listing(request: _Request, folder: Path) -> dict[str, int]:
    """The sizes of all files of the commit, if ``huggingface_hub`` cached them; else of the files in the folder."""
    try:
        from huggingface_hub import get_cached_repo_tree  # huggingface_hub 2 and later

        tree = get_cached_repo_tree(request.repo, revision=folder.name, cache_dir=request.access.cache_dir)
        return {entry.path: entry.size for entry in tree}
    except Exception:  # no such function, or no such list
        files = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _headers_folder(request: _Request, commit: str, scope: Weights) -> Path:
    assets = assets_folder(request.access.cache_dir)
    return assets / "reshard" / scope.value / request.repo.replace("/", "--") / commit


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


def _meant(path: Path) -> str:
    """``did you mean 'model'?``: existing names that are spelled nearly like a missing one, but for other numbers."""
    letters, names = re.sub(r"\d", "", path.name), list[str]()
    with suppress(OSError):
        names = [each.name for each in path.parent.iterdir() if re.sub(r"\d", "", each.name) != letters]
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.75)
    return f"did you mean {' or '.join(repr(str(path.with_name(name))) for name in near)}?" if near else ""


def _hint_for_path(source: str) -> str:
    if re.match(r"(?i:s3|gs|az|https?)://", source) and not source[:2].islower():
        return f"write {source.partition('://')[0].lower()}:// in small letters"
    match = re.match(r"(?:https?|hf)://(?:[^/]*\.[^/]*/)?(?:models/)?([\w.-]+/[\w.-]+)", source)
    if match:
        return f"give the Hub id alone: {match[1]}"
    if "@" in source:
        return "give a folder, or a Hub id like org/name with --revision"
    return "give a folder that exists, or a Hub id like org/name"


# --- errors --------------------------------------------------------------------------------------------------------


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_outage(error: BaseException) -> bool:
    """Whether the Hub could not be reached, broke off or failed; False if it refused the request."""
    from huggingface_hub.errors import HfHubHTTPError

    for cause in _causes(error):
        if isinstance(cause, HfHubHTTPError):
            return _status(cause) >= 500
        if isinstance(cause, ConnectionError | TimeoutError) or type(cause).__module__.split(".")[0] in _HTTP_LIBRARIES:
            return True
    return False


def _is_busy(error: Exception) -> bool:
    """Whether the Hub is busy: it answered with status 429 or a server error."""
    return any(status == 429 or status >= 500 for status in map(_status, _causes(error)))


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    causes = [*_causes(error)]
    is_offline = any(isinstance(cause, OfflineModeIsEnabled) for cause in causes)
    return not is_offline and (_is_outage(error) or 429 in map(_status, causes))


def _explain(error: Exception, request: _Request) -> CheckpointError:
    """The error to show to the user for a failed download, or for a refusal by the Hub."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo, page = request.repo, f"{constants.ENDPOINT}/{request.repo}"
    at = f" at revision {request.access.revision}" if request.access.revision else ""
    log_in = "give a token with --token (or HF_TOKEN), or run `hf auth login`"
    again = "run the same command again: files that are complete are not downloaded twice"
    for cause in _causes(error):
        status = _status(cause)
        match cause:
            case OSError() if cause.errno in _DISK_FULL:
                what = f"no space left (or a quota reached) while downloading {repo}"
                place = "give another place with --cache-dir (or HF_HOME)"
                hint = f"free some space, or {place}, then run the same command again"
            case OfflineModeIsEnabled():
                missing = f"{repo}{at} is no folder here and not (or not wholly) in the Hub's cache"
                what = f"{missing}, and HF_HUB_OFFLINE is set"
                hint = "unset HF_HUB_OFFLINE, or download it where there is a network: the cache can be copied"
            case HfHubHTTPError() if status >= 500:
                continue
            case GatedRepoError():
                what = f"{repo} is gated: access is for those who accepted its terms"
                hint = f"accept them at {page}, then {log_in}"
            case RevisionNotFoundError():
                what = f"{repo} has no revision {request.access.revision or 'main'}"
                hint = "give a branch, a tag or a full commit hash, or leave out --revision"
            case RepositoryNotFoundError():
                what = f"no folder {repo} here, and no repository of that name on the Hub (or a private one)"
                hint = f"check the name; for a private repository {log_in}"
            case HfHubHTTPError() if status in (401, 403):
                what, hint = f"the Hub refuses access to {repo} with this token ({status})", f"{log_in}; see {page}"
            case HfHubHTTPError() if status == 429:
                what, hint = f"the Hub refuses {repo} for now: too many requests (429)", f"wait a while, or {log_in}"
            case HfHubHTTPError():
                what, hint = f"the Hub did not deliver {repo}: {first_line(cause)}", "run the same command again later"
            case _:
                continue
        return CheckpointError(what, hint)
    if _is_outage(error):
        why = f"the connection to the Hub ({constants.ENDPOINT}) failed while fetching {repo}{at}: {first_line(error)}"
        return CheckpointError(f"no folder {repo} is here, and {why}", f"check the network, then {again}")
    return CheckpointError(f"fetching {repo}{at} from the Hub failed: {first_line(error)}", again)


def _status(error: BaseException) -> int:
    """The HTTP status of the Hub's answer; 0 without an answer."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


# --- what is shown -------------------------------------------------------------------------------------------------


@contextmanager
def _as_told(quiet: bool) -> Iterator[None]:
    """Show progress bars only on a terminal; with ``quiet`` neither bars nor warnings of ``huggingface_hub``."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    if quiet:
        logger.setLevel(logging.ERROR)
    try:
        with _bars_off() if quiet or not sys.stderr.isatty() else nullcontext():
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
    if not request.access.quiet:
        print(line, file=sys.stderr, flush=True)
