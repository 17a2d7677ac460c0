"""Addresses of runs in object storage: "s3://bucket/runs/mnist". Parsed here, and nothing is reached.

An address names a place and nothing else. Keys, tokens and endpoints come from the environment, as the storage's own
tools read them; an address that carries any is refused without being repeated, because addresses are printed.
"""

import os
import re
from dataclasses import dataclass

from dualform.errors import RemoteError

SCHEMES = {"s3": "Amazon S3 and what speaks its protocol", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")


@dataclass(frozen=True, slots=True)
class ObjectAddress:
    """The place of one run: every blob's key begins with `prefix` and a slash.

    Attributes:
        scheme: one of `SCHEMES`.
        bucket: the bucket, or container.
        prefix: the run's folder in it, without slashes at its ends.
    """

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"

    def key(self, name: str) -> str:
        """Return the key of a blob."""
        return f"{self.prefix}/{name}"


def is_address(place: object) -> bool:
    """Say whether a place is an address and not a path."""
    return isinstance(place, str) and _ADDRESS.fullmatch(place) is not None


def parse_address(text: str) -> ObjectAddress:
    """Return the parts of an address, or raise."""
    found = _ADDRESS.fullmatch(text)
    scheme = found[1].lower() if found else ""
    if found is None or scheme not in SCHEMES:
        known = ", ".join(f"{name}:// ({what})" for name, what in SCHEMES.items())
        raise RemoteError(f"An address begins with {scheme or text.partition(':')[0]!r}; expected one of {known}.")
    if any(sign in found[2] for sign in "@?#%"):
        raise RemoteError(
            f"An address of {scheme}:// has one of the signs @ ? # % in it. Give the bucket and the folder alone, as "
            f"in {scheme}://bucket/run; keys and tokens belong into the environment."
        )
    bucket, _, prefix = found[2].rstrip("/").partition("/")
    parts = prefix.split("/")
    if not all(_PART.fullmatch(part) for part in (bucket, *parts)):
        raise RemoteError(
            f"{text!r} is not the address of a run; expected a bucket and a folder of letters, digits and . _ = + -, "
            f"as in {scheme}://bucket/run."
        )
    return ObjectAddress(scheme, bucket, prefix)


def endpoint(scheme: str) -> str:
    """Return the storage's endpoint that the environment names, "" for the usual one."""
    names = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"), "az": ("AZURE_STORAGE_ENDPOINT",)}
    return next((os.environ[name] for name in names.get(scheme, ()) if os.environ.get(name)), "")
