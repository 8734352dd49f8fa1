"""Domains in object storage. A folder of the cache, the mirror, keeps the files that were read; it looks like any root.

boto3 transfers the bytes. It takes the endpoint and credentials from the environment or its own files, and repeats
requests that fail or break off.
"""

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seqarch.data.verified import cache_folder, damaged, is_known, remember, sha256_of
from seqarch.errors import UserError
from seqarch.runs.files import atomic, write_text

ORIGIN = ".origin"
"""The file in a mirror that holds the URL."""
_OPTIONS: dict[str, Any] = {
    "retries": {"max_attempts": 6, "mode": "standard"},
    "connect_timeout": 10,
    "read_timeout": 30,
}
"""Limits of each request, in seconds; the one for reading is the time between two pieces of an answer."""
_clients: dict[int, Any] = {}


def is_remote(root: str | Path) -> bool:
    """Whether a root is the URL of object storage, not a folder. One slash is enough: `Path` makes one of two."""
    return re.match(r"\w+:/", str(root)) is not None


def mirror(url: str) -> Path:
    """The folder with the files that were read from the root at `url`.

    Raises:
        UserError: the URL is of an unknown kind, or holds credentials, which would end up in run folders.
    """
    if not re.fullmatch(r"s3://[^/@?#]+(/[^@?#]*)?", url):
        shown = re.sub("^.*@|[?#].*", "...", url, flags=re.DOTALL)  # credentials must not be printed
        raise UserError(f"{shown} is not a URL of object storage: give s3://bucket/folder, no credentials or options")
    folder = cache_folder() / "mirrors" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    if not (folder / ORIGIN).is_file():
        write_text(folder / ORIGIN, url.rstrip("/"))
    return folder


@functools.cache
def origin(folder: Path) -> str | None:
    """The URL of a folder or file of a mirror; `None` elsewhere."""
    for parent in (folder, *folder.parents[:3]):
        # only what `mirror` made counts: a folder of shards from others could hold a file of this name
        if parent.parent == cache_folder() / "mirrors" and (parent / ORIGIN).is_file():
            return "/".join([(parent / ORIGIN).read_text(encoding="utf-8"), *folder.relative_to(parent).parts])
    return None


def fetch(path: Path, sha256: str | None = None) -> Path:
    """Make a file ready to be read: a missing file of a mirror is downloaded.

    One process of a machine downloads, the others wait for it.

    Args:
        path: the file.
        sha256: its checksum. Without a checksum, a file of a mirror is always downloaded.

    Raises:
        FileNotFoundError: object storage has no such file.
        UserError: it cannot be read, or its content differs from the checksum.
    """
    url = origin(path.parent)
    if url is None or (sha256 and is_known(path, sha256)):
        return path
    import filelock

    url = f"{url}/{path.name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        if sha256 and is_known(path, sha256):
            return path
        with atomic(path) as partial:
            with _one_line(url, "read"):
                _client().download_file(*_bucket_and_key(url), str(partial))
            if sha256 and sha256_of(partial) != sha256:
                raise damaged(url)
        if sha256:
            remember([path], sha256)
    return path


def upload(path: Path) -> None:
    """Write a file of a mirror to object storage; elsewhere nothing is done."""
    if (url := origin(path.parent)) is not None:
        with _one_line(url, "written to"):
            _client().upload_file(str(path), *_bucket_and_key(f"{url}/{path.name}"))


def folders(folder: Path) -> list[str]:
    """Names of the folders inside a folder of a mirror, as object storage lists them."""
    url = origin(folder)
    assert url is not None
    bucket, key = _bucket_and_key(url)
    with _one_line(url, "read"):
        listing = _client().get_paginator("list_objects_v2")
        pages = listing.paginate(Bucket=bucket, Prefix=f"{key}/" if key else "", Delimiter="/")
        return [Path(each["Prefix"]).name for page in pages for each in page.get("CommonPrefixes", ())]


def _bucket_and_key(url: str) -> tuple[str, str]:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key


def _client() -> Any:
    """The client of this process: a forked process needs a new one."""
    import boto3
    from botocore.config import Config

    if os.getpid() not in _clients:
        _clients[os.getpid()] = boto3.client("s3", config=Config(**_OPTIONS))
    return _clients[os.getpid()]


@contextlib.contextmanager
def _one_line(url: str, done: str) -> Iterator[None]:
    """The error in one line, without boto3's arguments; a missing object is a `FileNotFoundError`."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (ClientError, BotoCoreError, Boto3Error, ValueError) as error:  # a wrong endpoint is a ValueError
        named = str(error) if isinstance(error, ValueError) else type(error).__name__
        answer = error.response["Error"]["Code"] if isinstance(error, ClientError) else named
        if answer in ("404", "NoSuchKey"):
            raise FileNotFoundError(url) from None
        raise UserError(f"{url} cannot be {done} ({answer}): check place, network and credentials") from None
