"""Apache Kafka as one KRaft node on free ports of 127.0.0.1; without its jars, librdkafka's mock broker."""

from __future__ import annotations

import subprocess
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient

from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.jars import kafka_jars
from outbox_plugin.embedded.java import java_home
from outbox_plugin.embedded.server import EmbeddedServer, GuardedServer, ServerFailed

_CLUSTER_ID = "b3V0Ym94LWVtYmVkZGVkMQ"  # Any 16 bytes. All clusters may share it, as their ports differ.
_PROPERTIES = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={data}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=true
log.retention.hours=168
"""
NOT_PROVED_BY_MOCK = (
    "Kafka's jars could not be downloaded, so librdkafka's mock broker stands in for Kafka ({reason}). It proves "
    "nothing: it keeps nothing on disk, does not fence or recover transactions as Kafka does, and elects no leaders"
)


class KafkaNode(EmbeddedServer):
    """One process of Kafka, broker and controller, in `folder`.

    It listens on 127.0.0.1 and requires no password: every user of this machine can use and configure it.
    """

    name = "Kafka"
    java_options: Sequence[str] = ("-Xms256m", "-Xmx512m", "-XX:+UseG1GC")

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        """Make the node. It does not start it. `tell` is called with progress while the jars are downloaded."""
        super().__init__(folder)
        self._tell = tell

    @property
    def bootstrap_servers(self) -> str:
        """Its address."""
        return f"127.0.0.1:{self.port}"

    @abstractmethod
    def properties(self, port: int, data: str) -> str:
        """The server.properties, for clients at `port`, with the folder `data`."""

    def launch(self, inherited: Sequence[int] = ()) -> None:
        """Start the server without waiting for it, on its former port if that is free.

        Raises:
            JarsMissing: there are no jars.
            ServerFailed: its storage could not be created.
        """
        jars = kafka_jars(self._tell)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port(self.port)
        data, properties = self.folder / "data", self.folder / "server.properties"
        properties.write_text(self.properties(self.port, str(data).replace("\\", "\\\\")))
        java = [str(java_home() / "bin" / "java"), *self.java_options, "-cp", f"{jars}/*"]
        if not (data / "meta.properties").exists():
            self._format([*java, "kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", str(properties)])
        self._server = GuardedServer(
            self.name,
            [*java, "kafka.Kafka", str(properties)],
            self.folder / "kafka.log",
            stop_signal="SIGTERM",
            inherited=inherited,
        )

    @staticmethod
    def _format(command: Sequence[str]) -> None:
        done = subprocess.run([*command, "--ignore-formatted"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerFailed(f"Kafka could not create its storage: {(done.stderr or done.stdout).strip()[-300:]}")

    def answers(self, port: int) -> bool:
        """Whether the broker at `port` lists brokers. It listens before it can."""
        with suppress(KafkaException):
            return bool(AdminClient({"bootstrap.servers": f"127.0.0.1:{port}"}).list_topics(timeout=2).brokers)
        return False


class EmbeddedKafka(KafkaNode):
    """One broker, which is its own controller."""

    def properties(self, port: int, data: str) -> str:
        """The server.properties of a broker that is its own controller."""
        return _PROPERTIES.format(port=port, controller=free_port(), data=data)


class MockKafka:
    """librdkafka's mock broker, inside this process."""

    def __init__(self) -> None:
        self._client = Producer({"test.mock.num.brokers": 1, "log_level": 0})
        brokers = self._client.list_topics(timeout=10).brokers.values()
        self._address = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)

    @property
    def bootstrap_servers(self) -> str:
        """Its address."""
        return self._address

    def stop(self) -> None:
        """End it."""
        self._client.close()
