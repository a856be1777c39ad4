"""Servers that speak TLS: a Kafka with SCRAM, client certificates and ACLs, and a front for Postgres."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import shlex
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.kafka import EmbeddedKafka
from tests.stream_server import StreamServer
from tests.support import PATIENCE

PASSWORD = 'a password, with "quotes" and spaces'
_SECURITY = """listeners=INTERNAL://127.0.0.1:{internal},SCRAM://127.0.0.1:{port},MTLS://127.0.0.1:{mtls},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=INTERNAL://127.0.0.1:{internal},SCRAM://127.0.0.1:{port},MTLS://127.0.0.1:{mtls}
listener.security.protocol.map=INTERNAL:PLAINTEXT,SCRAM:SASL_SSL,MTLS:SSL,CONTROLLER:PLAINTEXT
inter.broker.listener.name=INTERNAL
sasl.enabled.mechanisms=SCRAM-SHA-512
listener.name.scram.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
ssl.keystore.type=PEM
ssl.keystore.location={server}
ssl.truststore.type=PEM
ssl.truststore.location={authority}
listener.name.mtls.ssl.client.auth=required
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
auto.create.topics.enable=false
"""


class Authority:
    """Signs certificates; `certificate` is the file that clients trust."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, f"authority {x509.random_serial_number():x}"[:64])]
        )
        issued = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        self.certificate = folder / "authority.pem"
        self.certificate.write_bytes(_as_pem(issued.sign(self._key, hashes.SHA256())))

    def issue(self, name: str, *, of_server: bool = False) -> Path:
        """A file with a private key and the certificate of `name`; of a server, for 127.0.0.1 as well."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))] if of_server else []
        builder = self._builder(subject, key).add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name), *names]), critical=False
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        file = self._folder / f"{name}.pem"
        file.write_bytes(private + _as_pem(builder.sign(self._key, hashes.SHA256())))
        return file

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
        )


def _as_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


class SecuredKafka(EmbeddedKafka):
    """`internal` is a listener for the tests alone, whose users may do everything."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, print)
        folder.mkdir(parents=True, exist_ok=True)
        self.authority = Authority(folder)
        self._server_file = self.authority.issue("localhost", of_server=True)
        self._internal, self._mtls = free_port(), free_port()

    @property
    def internal(self) -> str:
        return f"127.0.0.1:{self._internal}"

    @property
    def mtls(self) -> str:
        """The address for those who have a certificate."""
        return f"127.0.0.1:{self._mtls}"

    def properties(self, port: int, data: str) -> str:
        ours = _SECURITY.format(
            internal=self._internal,
            port=port,
            mtls=self._mtls,
            controller=(controller := free_port()),
            server=self._server_file,
            authority=self.authority.certificate,
        )
        replaced = {line.partition("=")[0] for line in ours.splitlines()}
        kept = [line for line in super().properties(port, data).splitlines() if line.partition("=")[0] not in replaced]
        kept = [line for line in kept if not line.startswith("controller.quorum.voters=")]
        return "\n".join([*kept, f"controller.quorum.voters=1@127.0.0.1:{controller}", ours])

    def answers(self, port: int) -> bool:
        return super().answers(self._internal)

    @cached_property
    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.internal})

    def add_user(self, name: str) -> dict[str, str]:
        """Let `name` log in by SCRAM; returns the properties with which it does."""
        credential = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        upsertion = UserScramCredentialUpsertion(name, credential, PASSWORD.encode())
        for done in self.admin.alter_user_scram_credentials([upsertion]).values():
            done.result(20 * PATIENCE)
        return {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.authority.certificate),
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": name,
            "sasl.password": PASSWORD,
        }

    def certify(self, name: str) -> dict[str, str]:
        """Properties of a client that has a certificate; its principal is `User:CN=name`."""
        file = str(self.authority.issue(name))
        return {
            "security.protocol": "SSL",
            "ssl.ca.location": str(self.authority.certificate),
            "ssl.certificate.location": file,
            "ssl.key.location": file,
        }

    def allow(self, commands: Sequence[str]) -> None:
        """Create the ACLs that commands for kafka-acls.sh would create."""
        self.add_acls([binding for command in commands for binding in bindings_of(command)])

    def add_acls(self, bindings: list[AclBinding]) -> None:
        """Create the ACLs, and wait until they are there."""
        for made in self.admin.create_acls(bindings).values():
            made.result(20 * PATIENCE)


def bindings_of(command: str) -> list[AclBinding]:
    """The ACLs that a command for kafka-acls.sh adds; anything that is not understood fails."""
    script, *arguments = shlex.split(command)
    assert script == "kafka-acls.sh"
    flags = [arguments.pop(arguments.index("--add"))]
    assert flags
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    options = {name: value for name, value in pairs if name != "--operation"}
    operations = [value for name, value in pairs if name == "--operation"]
    assert options.pop("--bootstrap-server") == "$BOOTSTRAP_SERVERS"
    principal = options.pop("--allow-principal")
    pattern = ResourcePatternType[options.pop("--resource-pattern-type", "literal").upper()]
    [(resource, name)] = options.items()
    kind = ResourceType[resource.removeprefix("--").replace("-", "_").upper()]
    return [
        AclBinding(kind, name, pattern, principal, "*", _operation(operation), AclPermissionType.ALLOW)
        for operation in operations
    ]


def _operation(name: str) -> AclOperation:
    """`DescribeConfigs` is DESCRIBE_CONFIGS."""
    return AclOperation["".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in name).lstrip("_")]


class TlsFront(StreamServer):
    """Speaks TLS with clients of Postgres, as a pooler does, and forwards what they say; plain clients are refused."""

    _REQUEST_TLS = struct.pack("!ii", 8, 80877103)
    _REQUEST_GSS = struct.pack("!ii", 8, 80877104)

    def __init__(self, target: int, certificate: Path) -> None:
        super().__init__()
        self._target = target
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):  # The client rejects our certificate, or is gone.
            if await self._begins_tls(reader, writer):
                to_server, from_us = await self.connect(self._target)
                await asyncio.gather(_pump(reader, from_us), _pump(to_server, writer))

    async def _begins_tls(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        while (request := await reader.readexactly(8)) == self._REQUEST_GSS:
            writer.write(b"N")
        if request != self._REQUEST_TLS:
            return False
        writer.write(b"S")
        await writer.start_tls(self._context)
        return True


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward until either side ends, then end the other."""
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
