"""Key files: the clients a bridge allows, and the bridge a client trusts (ZeroMQ CURVE).

`python -m bridge keys DIR rollout trainer` writes TOML that only its owner may read:

    DIR/bridge.keys            DIR/rollout.keys
    [curve]                    [curve]
    public-key = "..."         public-key = "..."
    secret-key = "..."         secret-key = "..."
    [clients]                  [bridge]
    rollout = "..."            server-key = "..."
    trainer = "..."

Keys are Z85 texts of 40 characters. A file's own pair is where `zmq.auth.load_certificate` expects
it.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import zmq
from zmq.utils import z85

from bridge.errors import TraceError

BRIDGE_FILE = "bridge.keys"
_SUFFIX = ".keys"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEY_BYTES = 32
_MAX_FILE_BYTES = 1 << 20


class InvalidKeys(TraceError):
    """A key file is missing, readable by other users or malformed."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, Z85."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> Self:
        """Make a new random pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass(frozen=True, slots=True)
class BridgeKeys:
    """A daemon's own pair, and the public keys (Z85) of its allowed clients by name."""

    own: KeyPair
    clients: Mapping[str, str]

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read a bridge's file; raise InvalidKeys."""
        content = _read(file)
        clients = content.get("clients")
        if not isinstance(clients, dict):
            raise InvalidKeys(
                f"{file} names no clients, so it is not a bridge's key file; serve with the "
                f"{BRIDGE_FILE} that `python -m bridge keys DIR CLIENT...` makes"
            )
        return cls(_own_pair(file, content), {name: _key(file, clients, name) for name in clients})

    def text(self) -> str:
        """Return the content of the file."""
        clients = [f'{name} = "{public}"' for name, public in self.clients.items()]
        return "\n".join([_pair_text(self.own), "[clients]", *clients, ""])


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The own pair of an engine or a trainer, and its bridge's public key, Z85."""

    own: KeyPair
    server: str

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read a client's file; raise InvalidKeys."""
        content = _read(file)
        bridge = content.get("bridge")
        if not isinstance(bridge, dict):
            raise InvalidKeys(
                f"{file} names no bridge, so it is not a client's key file; use the one that "
                "`python -m bridge keys DIR CLIENT` makes for this client"
            )
        return cls(_own_pair(file, content), _key(file, bridge, "server-key"))

    def text(self) -> str:
        """Return the content of the file."""
        return "\n".join([_pair_text(self.own), "[bridge]", f'server-key = "{self.server}"', ""])

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Configure an unconnected socket to encrypt and to accept only this bridge."""
        socket.curve_publickey = self.own.public.encode()
        socket.curve_secretkey = self.own.secret.encode()
        socket.curve_serverkey = self.server.encode()


def make_keys(directory: Path, clients: Iterable[str]) -> list[Path]:
    """Write a key file for every client and add it to the bridge's file, made if it is missing.

    Returns:
        the files written, the bridge's first.

    Raises:
        InvalidKeys: a name cannot be one, a client has a file, or they cannot be written.
    """
    names = list(dict.fromkeys(clients))
    for name in names:
        if not _NAME.fullmatch(name) or name + _SUFFIX == BRIDGE_FILE:
            raise InvalidKeys(
                f"{name!r} cannot name a client; use up to 64 letters, digits, - and _, not bridge"
            )
        if (directory / (name + _SUFFIX)).exists():
            raise InvalidKeys(
                f"{directory / (name + _SUFFIX)} exists already; use it, choose another name, or "
                "remove it to give the client a new key"
            )
    bridge_file = directory / BRIDGE_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        known = bridge_file.exists()
        bridge = BridgeKeys.load(bridge_file) if known else BridgeKeys(KeyPair.new(), {})
        pairs = {name: KeyPair.new() for name in names}
        added = {name: pair.public for name, pair in pairs.items()}
        _write(bridge_file, replace(bridge, clients={**bridge.clients, **added}).text())
        for name, pair in pairs.items():
            _write(directory / (name + _SUFFIX), ClientKeys(pair, bridge.own.public).text())
    except OSError as error:
        raise InvalidKeys(
            f"key files cannot be written to {directory} ({error.strerror}); choose another folder"
        ) from error
    return [bridge_file, *(directory / (name + _SUFFIX) for name in names)]


def _write(file: Path, text: str) -> None:
    """Replace a file atomically; only its owner can read it at any time."""
    draft = file.with_name(file.name + ".new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        opened.write(text)
    draft.replace(file)


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidKeys(
            f"the key file {file} cannot be read ({error.strerror}); "
            "make one with `python -m bridge keys DIR CLIENT...`"
        ) from error
    if stat.S_IMODE(mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidKeys(f"the key file {file} is open to other users; run chmod 600 {file}")
    try:
        return tomllib.loads(text.decode("ascii"))
    except ValueError as error:
        raise InvalidKeys(f"{file} is not a key file ({error}); {_REMAKE}") from error


def _own_pair(file: Path, content: Mapping[str, Any]) -> KeyPair:
    curve = content.get("curve")
    if not isinstance(curve, dict):
        raise InvalidKeys(f"{file} has no [curve] pair; {_REMAKE}")
    pair = KeyPair(_key(file, curve, "public-key"), _key(file, curve, "secret-key"))
    if zmq.curve_public(pair.secret.encode()).decode() != pair.public:
        raise InvalidKeys(f"the public and the secret key in {file} are no pair; {_REMAKE}")
    return pair


def _key(file: Path, table: Mapping[str, Any], name: str) -> str:
    key = table.get(name)
    try:
        if isinstance(key, str) and len(z85.decode(key)) == _KEY_BYTES:
            return key
    except (ValueError, KeyError):
        pass
    raise InvalidKeys(f"{name} in {file} is not a CURVE key of 40 Z85 characters; {_REMAKE}")


def _pair_text(pair: KeyPair) -> str:
    return f'[curve]\npublic-key = "{pair.public}"\nsecret-key = "{pair.secret}"\n'


_REMAKE = "make it again with `python -m bridge keys DIR CLIENT...`"
