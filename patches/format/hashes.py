"""Names of a file's content: as a wheel's RECORD and as git write them."""

import hashlib


def sha256(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def git_blob(content: bytes) -> str:
    """Git's object name of a file, which the ``index`` line of a patch has; needs no git."""
    header = b"blob %d\0" % len(content)
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()
