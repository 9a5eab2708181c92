"""Weight files that are not on this machine, read by byte ranges: on the Hub, in a bucket, behind a URL.

The requests are made by ``obstore``, which is imported only for such a file. A request that failed on the way is made
again, with growing pauses. ``obstore`` tries again by itself too, but does not say how often it tried. So its own
retries are used only for the parts of a large object that is written or copied as a whole.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from reshard.formats.errors import CheckpointError, MismatchError, ReshardError, redacted
from reshard.store.threads import interruptible

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

_BACKOFF = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=20), "base": 2}
_CLIENT = {"timeout": timedelta(seconds=60), "connect_timeout": timedelta(seconds=10), "allow_http": True}

_CREDENTIALS = (
    "give credentials as for the store's own tools: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY; AWS_SKIP_SIGNATURE=true for a "
    "public bucket, AWS_REQUEST_PAYER=true for one where the requester pays"
)


class Remote(ABC):
    """A file that is read by byte ranges, from any thread."""

    size: int
    """In bytes."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """A text that is equal only for equal contents, such as an etag."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The file's name in messages, without secrets."""

    @property
    def made_of(self) -> str | None:
        """Identifies the local files that it is computed from, on this machine only; None if there are none."""
        return None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The local folder and file that it is read from; none if it is not on this machine."""
        return ()

    def over_network(self, nbytes: int) -> int:
        """Return the number of bytes that a read of ``nbytes`` fetches over the network."""
        return 0 if self.paths else nbytes

    def check_unchanged(self) -> None:  # noqa: B027  # each answer of a server says it
        """Raise MismatchError if it is known to have changed since it was found."""

    @abstractmethod
    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop``. Raises CheckpointError, or MismatchError for another content."""


class RefusedError(CheckpointError):
    """The store does not give access to a file."""


PATIENCE = "RESHARD_RETRY_SECONDS"
"""The environment's variable with the seconds after which a request that failed is not tried again."""

_PATIENCE = "180"
_LONGEST_PATIENCE = 1_000_000
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 20.0
FIRST_CONTACT = 10.0
"""Seconds after which a place that never answered is given up: its name may be wrong."""


def patience() -> float:
    """The seconds after which a request that failed is not tried again. Raises CheckpointError."""
    with suppress(ValueError):
        seconds = float(os.environ.get(PATIENCE, _PATIENCE))
        if 0 <= seconds <= _LONGEST_PATIENCE:
            return seconds
    raise CheckpointError(
        f"{PATIENCE} is {os.environ[PATIENCE]!r}, which is not a number of seconds", f"give 0 to {_LONGEST_PATIENCE}"
    )


_lock, _again = threading.Lock(), 0


def tried_again() -> int:
    """The number of requests of this process that were made because an earlier one had failed."""
    return _again


def patiently(request: Callable[[], T], may_pass: Callable[[Exception], bool], seconds: float) -> T:
    """The result of a request, made again after a failure that may pass. Raises its last error after ``seconds``."""
    global _again
    give_up, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        try:
            return request()
        except Exception as error:
            if not may_pass(error) or time.monotonic() >= give_up:
                raise
        wait = random.uniform(0.5, 1.0) * pause  # so that many processes do not come back at the same time
        time.sleep(max(0.0, min(wait, give_up - time.monotonic())))
        pause = min(2 * pause, _LONGEST_PAUSE)
        with _lock:
            _again += 1


def ask(request: Callable[[], T], address: str, doing: str = "reading", *, is_first: bool = False) -> T:
    """The result of ``obstore``'s request, made again after a failure on the way (lost connections, 408, 429, 5xx).

    It is given up after ``patience()``, the first contact with a place earlier. Raises CheckpointError; MismatchError
    for another content; OSError of this machine's disk.
    """

    def may_pass(error: Exception) -> bool:
        status = status_of(error)
        return status in {"408", "429"} or status.startswith("5") if status else is_broken_connection(error)

    seconds = min(patience(), FIRST_CONTACT) if is_first else patience()
    try:
        return patiently(lambda: interruptible(request), may_pass, seconds)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise explain(error, address, doing) from None


def open_store(url: str, headers: dict[str, str] | None = None, *, once: bool = False) -> ObjectStore:
    """The store behind a URL. Credentials are taken from where the store's own tools look for them.

    A name and a password in it are sent as HTTP's basic authentication. With ``once`` it does not try a request again
    by itself. Raises CheckpointError for an invalid URL.
    """
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    client, parts, headers = dict[str, Any](_CLIENT), urlsplit(url), headers or {}
    if parts.scheme in {"http", "https"} and "@" in parts.netloc:
        who, _, host = parts.netloc.rpartition("@")
        url, basic = parts._replace(netloc=host).geturl(), b64encode(unquote(who).encode()).decode()
        headers = {**headers, "Authorization": f"Basic {basic}"}
    if headers:
        client["default_headers"] = headers
    seconds = timedelta(seconds=patience())
    retries = {"max_retries": 0 if once else 1000, "backoff": _BACKOFF, "retry_timeout": seconds}
    make: Callable[..., ObjectStore] = from_url
    credentials = _profile() if url.startswith("s3") else {}
    try:
        return make(url, client_options=client, retry_config=retries, **credentials)
    except (BaseError, ValueError) as error:
        raise CheckpointError(f"{redacted(url)} cannot be opened: {first_line(error)}") from None


def _profile() -> dict[str, Any]:
    """Return the credentials of a profile in ``~/.aws``, if one is set. boto3 reads all kinds of profiles.

    Raises CheckpointError for AWS_PROFILE without boto3, or for a profile that gives none.
    """
    profile = os.environ.get("AWS_PROFILE")
    if "AWS_ACCESS_KEY_ID" in os.environ or os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in {"1", "true"}:
        return {}
    places = (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials"))
    files = (Path(os.environ.get(variable) or f"~/.aws/{name}").expanduser() for variable, name in places)
    if profile is None and not any(file.is_file() for file in files):
        return {}
    try:
        from boto3.session import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if profile is None:  # there are other places to look
            return {}
        raise CheckpointError(
            f"AWS_PROFILE is {profile}, and boto3, which reads profiles, is not installed",
            'pip install boto3, or eval "$(aws configure export-credentials --format env)"',
        ) from None
    try:
        return {"credential_provider": Boto3CredentialProvider(Session(profile_name=profile))}
    except Exception as error:  # botocore's own, which are many
        if profile is None:
            return {}
        raise CheckpointError(
            f"the profile {profile} (AWS_PROFILE) cannot be used: {first_line(error)}",
            "see 'aws configure list-profiles'",
        ) from None


def read_range(store: ObjectStore, key: str, start: int, stop: int, etag: str | None, address: str) -> memoryview:
    """Bytes of an object of this etag, if one is known. Raises CheckpointError, MismatchError."""
    from obstore import get

    # a weak etag cannot be asked for
    options: Any = {"range": (start, stop)} | ({"if_match": etag} if etag and not etag.startswith("W/") else {})

    def request() -> tuple[Any, str | None]:
        answer = get(store, key, options=options)
        return answer.bytes(), etag_of(answer.meta)

    content, version = ask(request, address)
    check_version(etag, version, address)
    if len(content) != stop - start:
        raise CheckpointError(f"{address}: {len(content)} bytes came where {stop - start} were asked for")
    return memoryview(content)


def etag_of(meta: Mapping[str, Any]) -> str | None:
    """The etag of an object as HTTP has it, in quotes: Azure's lists leave them out."""
    etag = meta.get("e_tag")
    return etag if not etag or etag.endswith('"') else f'"{etag}"'


def check_version(etag: str | None, version: str | None, address: str) -> None:
    """Raise MismatchError if the answer has another etag than the listing, if both are known."""
    if etag and version and version != etag:
        raise _replaced(address)


def _replaced(address: str) -> MismatchError:
    return MismatchError(f"{address} was replaced while it was read", "run the command again when nobody writes there")


def explain(error: Exception, address: str, doing: str = "reading") -> ReshardError:
    """The error to show for a request that failed; it holds no query and no credentials."""
    from obstore.exceptions import PermissionDeniedError, PreconditionError, UnauthenticatedError

    if isinstance(error, PreconditionError):
        return _replaced(address)
    status = status_of(error)
    if "NoSuchBucket" in str(error):
        bucket = "/".join(address.split("/")[:3])
        return CheckpointError(f"there is no bucket {bucket}", "check its name, its region, and the endpoint")
    if isinstance(error, FileNotFoundError) or status == "404":
        return CheckpointError(f"{address} is not there (404)", "check the name; a private one may need credentials")
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in {"401", "403"}:
        return RefusedError(f"access to {address} is refused ({status or 'no credentials'})", _CREDENTIALS)
    if sends_no_parts(error):
        return CheckpointError(
            f"{address}: the server, or a proxy before it, does not send parts of files",
            "download the files first, and give their folder",
        )
    return CheckpointError(
        f"{doing} {address} failed, and trying again did not help: {first_line(error)}",
        "run the same command again: files that are complete are kept",
    )


def first_line(error: BaseException) -> str:
    """The first line of an error."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# --- what only the texts of obstore's errors say -------------------------------------------------------------------
# If a new release changes these texts, only this file breaks; tests/formats/test_internals.py has one of each.


def status_of(error: Exception) -> str | None:
    """The HTTP status of the answer to the last try."""
    match = re.search(r"status code: (\d+)", str(error))
    return match[1] if match else None


def is_broken_connection(error: Exception) -> bool:
    """Whether the connection failed, or broke off in the middle of an answer."""
    return "HTTP error:" in str(error)


def sends_no_parts(error: Exception) -> bool:
    """Whether the server answered a request for a range with the whole file."""
    from obstore.exceptions import NotSupportedError

    return isinstance(error, NotSupportedError) or "non-partial response" in str(error)
