"""Signs a statement and checks the signature: ed25519 in a DSSE envelope. Needs cryptography.

    PAE        "DSSEv1" SP LEN(type) SP type SP LEN(body) SP body    the bytes that are signed
    envelope   {"payload": base64(body), "payloadType": type, "signatures": [{"keyid", "sig"}]}
    key id     SHA-256 of the public key's DER, as of
               openssl pkey -pubin -in PUB -outform DER | sha256sum

DSSE protocol 1.0, https://github.com/secure-systems-lab/dsse. A key id only names a key and proves
nothing: `check_signature` does not rely on it. Signatures of ed25519 are deterministic, so that
equal statements have equal envelopes.
"""

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memguard.errors import MAX_PATH, ConfigError, RecordError, require_library, shorten
from memguard.evidence.statement import hash_bytes, write_canonical

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
_MAX_KEY_BYTES = 1 << 16
_SIGNATURE_SIZE = 64
_DAMAGED = "has a signature that is damaged"
_MAKE_KEY = "'openssl genpkey -algorithm ed25519 -out KEY' makes one"


class _NoPasswordError(Exception):
    """A key has a password, and there is no terminal to ask for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """A signed statement, as far as it can be read without the key."""

    payload: bytes
    key_id: str
    signature: bytes

    def write(self) -> bytes:
        """Return the contents of `statement.dsse.json`."""
        return write_canonical(
            {
                "payload": base64.b64encode(self.payload).decode(),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [
                    {"keyid": self.key_id, "sig": base64.b64encode(self.signature).decode()}
                ],
            }
        )


def encode_for_signing(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that are signed: DSSE's pre-authentication encoding (PAE)."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def sign(statement: bytes, key: "Ed25519PrivateKey") -> Envelope:
    """Return a statement with its signature.

    Args:
        statement: contents of `statement.json`.
        key: see `load_private_key`.
    """
    signature = key.sign(encode_for_signing(PAYLOAD_TYPE, statement))
    return Envelope(payload=statement, key_id=name_key(key.public_key()), signature=signature)


def read_envelope(content: bytes) -> Envelope:
    """Read `statement.dsse.json` in the form that `Envelope.write` gives it.

    Raises:
        RecordError: it has another form; the message is a predicate.
    """
    try:
        values = json.loads(content)
        (signed,) = values["signatures"]
        envelope = Envelope(
            payload=base64.b64decode(values["payload"], validate=True),
            key_id=signed["keyid"],
            signature=base64.b64decode(signed["sig"], validate=True),
        )
        is_intact = (
            re.fullmatch("[0-9a-f]{64}", envelope.key_id) is not None
            and len(envelope.signature) == _SIGNATURE_SIZE
            and envelope.write() == content
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RecordError(_DAMAGED) from error
    if not is_intact:
        raise RecordError(_DAMAGED)
    return envelope


def check_signature(envelope: Envelope, key: "Ed25519PublicKey") -> None:
    """Refuse an envelope that the owner of a key has not signed.

    Args:
        envelope: of a bundle.
        key: see `load_public_key`.

    Raises:
        RecordError: another key signed it, or what was signed has changed; the message is a
            predicate.
    """
    from cryptography.exceptions import InvalidSignature

    own = name_key(key)
    try:
        key.verify(envelope.signature, encode_for_signing(PAYLOAD_TYPE, envelope.payload))
    except InvalidSignature as error:
        if envelope.key_id != own:
            raise RecordError(
                f"is not signed by this key: it names key id {envelope.key_id}, and this one has "
                f"{own}"
            ) from error
        raise RecordError(
            f"has a signature that is not of this key (id {own}): it was forged, or what was "
            "signed has changed"
        ) from error
    if envelope.key_id != own:
        raise RecordError(
            f"is signed by this key (id {own}) but names key id {envelope.key_id}: it was changed"
        )


def name_key(key: "Ed25519PublicKey") -> str:
    """Return the key id of a public key."""
    from cryptography.hazmat.primitives import serialization

    return hash_bytes(
        key.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )


def load_private_key(
    path: Path, option: str, ask_password: Callable[[], str | None]
) -> "Ed25519PrivateKey":
    """Read the key that signs: PEM (PKCS 8) or OpenSSH.

    Args:
        path: of the key.
        option: names it in messages.
        ask_password: called for a key with a password; None without a terminal.

    Raises:
        ConfigError: cryptography is not installed, or the file is no such key.
    """
    require_library("cryptography", f"'{option}'", extra="sign")
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    content = _read_key(path, option)
    is_openssh = b"BEGIN OPENSSH PRIVATE KEY" in content
    load: Any = forms.load_ssh_private_key if is_openssh else forms.load_pem_private_key
    shown = shorten(str(path), MAX_PATH)
    try:
        key = _load_with_password(load, content, ask_password)
    except _NoPasswordError as error:
        raise ConfigError(
            f"'{option}': the key '{shown}' has a password, which can be typed at a terminal only"
        ) from error
    except Exception as error:  # The library raises errors of many kinds for what is no key.
        reason = "it cannot be read as one, or the password is wrong"
        if b"PUBLIC KEY" in content or content.startswith(b"ssh-"):
            reason = "it is a public key"
        elif "bcrypt" in str(error):
            reason = "a password of OpenSSH's form needs the package bcrypt; PEM needs none"
        raise ConfigError(
            f"'{option}' must be a private key of ed25519, PEM or OpenSSH; got '{shown}': "
            f"{reason}. {_MAKE_KEY}"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            f"'{option}' must be a private key of ed25519; '{shown}' is of another kind. "
            f"{_MAKE_KEY}"
        )
    return key


def _load_with_password(load: Any, content: bytes, ask_password: Callable[[], str | None]) -> Any:
    """Load a key.

    Raises:
        _NoPasswordError: it has a password, and ``ask_password`` is None.
    """
    try:
        return load(content, password=None)
    except (TypeError, ValueError) as error:
        if "password" not in str(error).lower() and "encrypted" not in str(error).lower():
            raise
        password = ask_password()
        if password is None:
            raise _NoPasswordError from error
        return load(content, password=password.encode())


def load_public_key(path: Path, option: str) -> "Ed25519PublicKey":
    """Read the key that checks a signature: PEM, or a line of OpenSSH.

    Args:
        path: of the key.
        option: names it in messages.

    Raises:
        ConfigError: cryptography is not installed, or the file is no such key.
    """
    require_library("cryptography", f"'{option}'", extra="sign")
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    content, shown = _read_key(path, option), shorten(str(path), MAX_PATH)
    load: Any = forms.load_pem_public_key
    if content.startswith(b"ssh-"):
        load = forms.load_ssh_public_key
    try:
        key = load(content)
    except Exception as error:  # As above.
        is_private = b"PRIVATE KEY" in content
        reason = "it is a private key" if is_private else "it cannot be read as one"
        raise ConfigError(
            f"'{option}' must be a public key of ed25519, PEM or OpenSSH; got '{shown}': {reason}. "
            "'openssl pkey -in KEY -pubout -out PUB' writes it"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(
            f"'{option}' must be a public key of ed25519; '{shown}' is of another kind"
        )
    return key


def _read_key(path: Path, option: str) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        shown = shorten(str(path), MAX_PATH)
        raise ConfigError(f"'{option}': '{shown}' cannot be read: {error.strerror}") from error
    if len(content) > _MAX_KEY_BYTES:
        raise ConfigError(
            f"'{option}' must be a key; '{shorten(str(path), MAX_PATH)}' has more than "
            f"{_MAX_KEY_BYTES:,} bytes"
        )
    return content
