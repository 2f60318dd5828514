"""Compiled kernels on disk: found by everything that went into them, written whole or not at all.

The cache is a convenience. A folder that cannot be written, a file cut short, another process writing the same entry:
none of it is an error, at worst the kernel is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

LAYOUT = "1"
"""Changes when the layout of an entry does."""

_ENV = "CUPYQ_CACHE_DIR"
_warned = False


def folder() -> Path:
    """Return the cache's folder: $CUPYQ_CACHE_DIR, else `kernels` in the platform's cache folder for cupyq."""
    given = os.environ.get(_ENV)
    if given:
        return Path(given)
    import platformdirs

    return platformdirs.user_cache_path("cupyq", appauthor=False) / "kernels"


def key(*parts: str) -> str:
    """Return the name of the entry that these parts (source, options, versions, ...) determine."""
    digest = hashlib.sha256()
    for part in (LAYOUT, *parts):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:40]


def read(name: str) -> tuple[dict[str, Any], bytes] | None:
    """Return the (facts, bytes) stored as `name`, or None if there is no whole entry."""
    try:
        data = (folder() / name).read_bytes()
    except OSError:
        return None
    head, mark, rest = data.partition(b"\n")
    digest, mark2, payload = rest.partition(b"\n")
    if not mark or not mark2 or hashlib.sha256(head + payload).hexdigest().encode() != digest:
        return None
    try:
        return json.loads(head), payload
    except ValueError:
        return None


def write(name: str, facts: dict[str, Any], payload: bytes) -> None:
    """Store an entry: into a temporary file beside it, then renamed. Warns once if the folder cannot be written."""
    global _warned
    import tempfile  # here: a first product with a kernel that CuPy keeps needs nothing of this

    head = json.dumps(facts).encode()
    data = b"\n".join((head, hashlib.sha256(head + payload).hexdigest().encode(), payload))
    target = folder() / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        if not _warned:
            _warned = True
            warnings.warn(
                f"compiled kernels cannot be kept in {target.parent} ({error.strerror}); "
                f"set {_ENV} to a folder that can be written",
                RuntimeWarning,
                stacklevel=2,
            )
