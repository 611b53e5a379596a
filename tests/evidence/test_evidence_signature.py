"""Signatures are those of the DSSE protocol, and only the key that made one verifies it.

The vectors are those of secure-systems-lab/dsse, `protocol.md` and `testvectors/vectors.json`;
their keys are the first two of RFC 8032, section 7.1.
"""

import base64
import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from memguard import errors
from memguard.errors import ConfigError, RecordError
from memguard.evidence.signature import (
    PAYLOAD_TYPE,
    check_signature,
    encode_for_signing,
    load_private_key,
    load_public_key,
    name_key,
    read_envelope,
    sign,
)

SEEDS = {
    "A": "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
    "B": "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
}
PAYLOAD = b'{"_type":"https://in-toto.io/Statement/v1"}'
SIGNATURES = {
    ("A", PAYLOAD): "2WAfaHm5jluo0w+0rk8uVkluELJYWjSmU9x7EUzx+AyteDGJ4/nqyJXfmAUVFIAoQafWm7AxBZNw"
    "5M9ixNHiCA==",
    ("B", PAYLOAD): "c1+67/aT0yqEpwx8PsVY3MLHsj9D0CZ014/Fv/QlG59P+9CobUZ7xECJ/V3USG0Ob9CiE5LjReEZ"
    "UzNF2l7eBw==",
    ("A", b""): "gSggCAaTLTYyRH6FIDBem6meyIynsYy8RTHVzwx9tnTb7Bg/1jMWnuVgI/gffqmbsC2VX5/jHfkkDqsj7"
    "CDbDg==",
}
NON_ASCII = "application/vnd.exämple+json"
NON_ASCII_SIGNATURE = (
    "xmSk/ug66ysT7ayhkCIjhAq42zgZXSsEWuzUaNL7w2eGAdF/NU6/fRXPtmfN+5DNSAs5/i2lUnHjbbjPsu0tAw=="
)


def get_key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(SEEDS[name]))


@pytest.mark.parametrize(
    ("kind", "payload", "encoded"),
    [
        (
            "http://example.com/HelloWorld",
            b"hello world",
            b"DSSEv1 29 http://example.com/HelloWorld 11 hello world",
        ),
        (PAYLOAD_TYPE, PAYLOAD, b"DSSEv1 28 application/vnd.in-toto+json 43 " + PAYLOAD),
        (
            PAYLOAD_TYPE,
            b"\xfb\xff\xbf>?",
            b"DSSEv1 28 application/vnd.in-toto+json 5 \xfb\xff\xbf>?",
        ),
        (PAYLOAD_TYPE, b"", b"DSSEv1 28 application/vnd.in-toto+json 0 "),
        # The length is that of the bytes, 29, not of the 28 characters.
        (NON_ASCII, PAYLOAD, f"DSSEv1 29 {NON_ASCII} 43 ".encode() + PAYLOAD),
        ("", PAYLOAD, b"DSSEv1 0  43 " + PAYLOAD),
    ],
)
def test_what_is_signed_is_the_encoding_of_the_protocol(
    kind: str, payload: bytes, encoded: bytes
) -> None:
    assert encode_for_signing(kind, payload) == encoded


@pytest.mark.parametrize(("name", "payload"), SIGNATURES)
def test_signatures_are_those_of_the_vectors(name: str, payload: bytes) -> None:
    envelope = sign(payload, get_key(name))
    assert base64.b64encode(envelope.signature).decode() == SIGNATURES[name, payload]
    check_signature(envelope, get_key(name).public_key())
    values = json.loads(envelope.write())
    assert base64.b64decode(values["payload"]) == payload
    assert (values["payloadType"], len(values["signatures"])) == (PAYLOAD_TYPE, 1)
    # The library alone, as another program would call it.
    get_key(name).public_key().verify(
        base64.b64decode(values["signatures"][0]["sig"]),
        b"DSSEv1 28 application/vnd.in-toto+json %d " % len(payload) + payload,
    )


def test_the_type_is_signed_too() -> None:
    public = get_key("A").public_key()
    signature = base64.b64decode(NON_ASCII_SIGNATURE)
    public.verify(signature, encode_for_signing(NON_ASCII, PAYLOAD))
    with pytest.raises(InvalidSignature):
        public.verify(signature, encode_for_signing(PAYLOAD_TYPE, PAYLOAD))


def test_another_key_is_named() -> None:
    envelope = sign(PAYLOAD, get_key("A"))
    ids = {name: name_key(get_key(name).public_key()) for name in SEEDS}
    with pytest.raises(RecordError, match=f"names key id {ids['A']}, and this one has {ids['B']}"):
        check_signature(envelope, get_key("B").public_key())


def test_every_flipped_bit_of_an_envelope_is_found() -> None:
    key = get_key("A")
    written = sign(b"{}", key).write()
    assert read_envelope(written).write() == written
    for at in range(len(written)):
        for bit in range(8):
            changed = bytearray(written)
            changed[at] ^= 1 << bit
            try:
                envelope = read_envelope(bytes(changed))
            except RecordError:
                continue
            if envelope.payload == b"{}":  # Another payload is compared with the statement.
                with pytest.raises(RecordError):
                    check_signature(envelope, key.public_key())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"payload": "", "payloadType": "application/vnd.in-toto+json", "signatures": []}',
        b'{"payload": 1, "signatures": [{"keyid": "", "sig": ""}]}',
        b"\xff",
    ],
)
def test_what_is_no_envelope_is_refused(content: bytes) -> None:
    with pytest.raises(RecordError, match="has a signature that is damaged"):
        read_envelope(content)


def save_private(path: Path, kind: str, password: bytes | None = None) -> Path:
    form = {"pem": forms.PrivateFormat.PKCS8, "openssh": forms.PrivateFormat.OpenSSH}[kind]
    locked: forms.KeySerializationEncryption = forms.NoEncryption()
    if password is not None:
        locked = forms.BestAvailableEncryption(password)
    path.write_bytes(get_key("A").private_bytes(forms.Encoding.PEM, form, locked))
    return path


def save_public(path: Path, kind: str) -> Path:
    encoding, form = {
        "pem": (forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo),
        "openssh": (forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH),
    }[kind]
    path.write_bytes(get_key("A").public_key().public_bytes(encoding, form))
    return path


@pytest.mark.parametrize("kind", ["pem", "openssh"])
def test_keys_of_both_forms_are_read(tmp_path: Path, kind: str) -> None:
    private = load_private_key(save_private(tmp_path / "key", kind), "--sign", lambda: None)
    public = load_public_key(save_public(tmp_path / "pub", kind), "--key")
    assert name_key(private.public_key()) == name_key(public) == name_key(get_key("A").public_key())
    check_signature(sign(PAYLOAD, private), public)


def test_a_key_with_a_password_asks_for_it(tmp_path: Path) -> None:
    path = save_private(tmp_path / "key", "pem", b"right")
    key = load_private_key(path, "--sign", lambda: "right")
    assert name_key(key.public_key()) == name_key(get_key("A").public_key())
    with pytest.raises(ConfigError, match="has a password, which can be typed at a terminal only"):
        load_private_key(path, "--sign", lambda: None)
    with pytest.raises(ConfigError, match="or the password is wrong"):
        load_private_key(path, "--sign", lambda: "wrong")


def test_what_is_no_key_is_refused_with_one_line(tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    pem = (forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    (tmp_path / "ec").write_bytes(other.private_bytes(*pem))
    (tmp_path / "ec.pub").write_bytes(
        other.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    )
    (tmp_path / "text").write_text("not a key")
    (tmp_path / "large").write_bytes(bytes(1 << 17))
    private = save_private(tmp_path / "key", "pem")
    public = save_public(tmp_path / "pub", "pem")
    for path, signs, message in (
        (tmp_path / "ec", True, "is of another kind"),
        (tmp_path / "ec.pub", False, "is of another kind"),
        (tmp_path / "text", True, "cannot be read as one"),
        (tmp_path / "text", False, "cannot be read as one"),
        (tmp_path / "large", True, "has more than 65,536 bytes"),
        (tmp_path / "none", False, "No such file"),
        (tmp_path, True, "Is a directory"),
        (public, True, "it is a public key"),
        (private, False, "it is a private key"),
    ):
        option = "--sign" if signs else "--key"
        with pytest.raises(ConfigError) as caught:
            _ = (
                load_private_key(path, option, lambda: None)
                if signs
                else load_public_key(path, option)
            )
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith(f"'{option}'")


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'memguard\[sign\]'"):
        load_private_key(tmp_path / "key", "--sign", lambda: None)
    with pytest.raises(ConfigError, match=r"pip install 'memguard\[sign\]'"):
        load_public_key(tmp_path / "pub", "--key")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_makes_keys_and_the_same_signature(tmp_path: Path) -> None:
    def openssl(*words: object) -> bytes:
        command = ["openssl", *map(str, words)]
        return subprocess.run(command, capture_output=True, check=True).stdout

    key, public = tmp_path / "key", tmp_path / "pub"
    openssl("genpkey", "-algorithm", "ed25519", "-out", key)
    openssl("pkey", "-in", key, "-pubout", "-out", public)
    envelope = sign(PAYLOAD, load_private_key(key, "--sign", lambda: None))
    check_signature(envelope, load_public_key(public, "--key"))
    (tmp_path / "signed").write_bytes(b"DSSEv1 28 application/vnd.in-toto+json 43 " + PAYLOAD)
    # Ed25519 has one signature for each message and key.
    assert envelope.signature == openssl(
        "pkeyutl", "-sign", "-rawin", "-inkey", key, "-in", tmp_path / "signed"
    )
    der = openssl("pkey", "-pubin", "-in", public, "-outform", "DER")
    assert envelope.key_id == hashlib.sha256(der).hexdigest()
