"""Apache Kafka as three KRaft nodes on this machine, each of which can be killed and started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from confluent_kafka import ElectionType, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from outbox_plugin.adapters.kafka_clients import LIBRARY_LOGGER
from outbox_plugin.core.coordinator_partition import TRANSACTION_STATE_TOPIC, coordinator_partition
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.kafka import KafkaNode
from outbox_plugin.embedded.server import START_SECONDS, ServerFailed

NODES = 3
# A dead broker is noticed after three seconds, not nine. Two in-sync replicas suffice, so any one node may be down.
_PROPERTIES = """process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners={listeners},CONTROLLER://127.0.0.1:{controller}
advertised.listeners={advertised}
listener.security.protocol.map={protocols},CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
controller.listener.names=CONTROLLER
log.dirs={data}
default.replication.factor=3
min.insync.replicas=2
offsets.topic.replication.factor=3
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=3
transaction.state.log.min.isr=2
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=3
share.coordinator.state.topic.min.isr=2
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
replica.lag.time.max.ms=5000
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
num.network.threads=2
num.io.threads=4
log.cleaner.dedupe.buffer.size=16777216
log.retention.hours=168
"""
Coordinated = Literal["group", "transactional id"]
_COORDINATORS: dict[Coordinated, str] = {"group": "__consumer_offsets", "transactional id": TRANSACTION_STATE_TOPIC}
COORDINATING_TOPICS = tuple(_COORDINATORS.values())  # The leaders of their partitions are the coordinators.


class ClusterNode(KafkaNode):
    """One of the nodes, with a small heap; `controllers` are the quorum's ports, by node id."""

    java_options = ("-Xms96m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

    def __init__(self, folder: Path, tell: Callable[[str], None], node: int, controllers: dict[int, int]) -> None:
        """Nothing is started yet.

        Args:
            folder: holds the node's data and log.
            tell: is called with each line of progress.
            node: its id.
            controllers: the port of each controller of the quorum, by node id.
        """
        super().__init__(folder, tell)
        self.node = node
        self._controllers = controllers
        self._proxied: dict[int, int] = {}  # Ports that it listens on, with the port that it advertises for each.
        self.name = f"Kafka node {node}"
        self.port = free_port()  # Kept across restarts, because clients and the other nodes remember it.

    def listen_behind(self, proxy_port: int) -> int:
        """Listen on one more port, for clients behind the proxy at `proxy_port`. Call it before the start.

        A client asks a broker for the addresses of all brokers. On this port, the node advertises the proxy's address.

        Returns:
            The port to which the proxy must forward.
        """
        port = free_port()
        self._proxied[port] = proxy_port
        return port

    def properties(self, port: int, data: str) -> str:
        """The node's server.properties, for clients at `port`, with the folder `data`."""
        voters = ",".join(f"{node}@127.0.0.1:{each}" for node, each in self._controllers.items())
        ports = {"PLAINTEXT": (port, port)}
        ports |= {f"PROXIED{number}": each for number, each in enumerate(self._proxied.items())}
        return _PROPERTIES.format(
            node=self.node,
            voters=voters,
            listeners=",".join(f"{name}://127.0.0.1:{own}" for name, (own, _) in ports.items()),
            advertised=",".join(f"{name}://127.0.0.1:{told}" for name, (_, told) in ports.items()),
            protocols=",".join(f"{name}:PLAINTEXT" for name in ports),
            controller=self._controllers[self.node],
            data=data,
        )

    def answers(self, port: int) -> bool:
        """Whether the node at `port` is one of the cluster's brokers."""
        with suppress(KafkaException):
            return self.node in AdminClient({"bootstrap.servers": f"127.0.0.1:{port}"}).list_topics(timeout=2).brokers
        return False


class EmbeddedCluster:
    """Three nodes, each broker and controller, in `folder`; topics have three replicas, of which two must be in sync.

    Example:
        with EmbeddedCluster(folder) as cluster:
            cluster.leader("orders", 0).kill()
    """

    def __init__(self, folder: Path, tell: Callable[[str], None] = lambda _: None) -> None:
        """Make the cluster. It does not start it. `tell` is called with progress while Kafka's jars are downloaded."""
        controllers = {node: free_port() for node in range(1, NODES + 1)}
        self.nodes = [ClusterNode(folder / str(node), tell, node, controllers) for node in controllers]

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of all nodes."""
        return ",".join(node.bootstrap_servers for node in self.nodes)

    def start(self) -> None:
        """Start all nodes, and wait for them.

        Raises:
            JarsMissing: there are no jars.
            ServerFailed: a node does not start.
        """
        try:
            with ThreadPoolExecutor(NODES) as pool:
                list(pool.map(lambda node: node.launch(), self.nodes))
            for node in self.nodes:
                node.wait()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill all nodes; safe to call twice.

        In an orderly stop, the last node would wait in vain for a controller. Nothing that was acknowledged is lost.
        """
        for node in self.nodes:
            with suppress(ServerFailed):
                node.kill()
            node.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def restart(self, node: ClusterNode) -> None:
        """Start `node`, which was killed or stopped, and wait until it has caught up: then another node may fail.

        Raises:
            ServerFailed: it did not start, or did not catch up.
        """
        node.launch()
        node.wait()
        self.wait_in_sync()

    def revive(self) -> None:
        """Start all nodes that are down, and wait until all have caught up.

        Raises:
            ServerFailed: one did not start, or did not catch up.
        """
        for node in self.nodes:
            try:
                _ = node.pid
            except ServerFailed:
                node.launch()
        for node in self.nodes:
            node.wait()
        self.wait_in_sync()

    def rolling_restart(self) -> None:
        """Stop and start one node after the other, as in an upgrade.

        Raises:
            ServerFailed: one did not come back.
        """
        for node in self.nodes:
            node.stop()
            self.restart(node)

    def wait_in_sync(self, seconds: float = START_SECONDS) -> None:
        """Wait until every replica of every partition is in sync.

        Raises:
            ServerFailed: some replica was not in sync within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while behind := self._behind():
            if time.monotonic() > deadline:
                raise ServerFailed(f"Kafka: not in sync within {seconds:.0f} s: {', '.join(behind[:5])}")
            time.sleep(0.1)

    def _behind(self) -> list[str]:
        try:
            found = self._admin().list_topics(timeout=5)
        except KafkaException as error:
            return [error.args[0].str()]
        if len(found.brokers) < NODES:
            return [f"{len(found.brokers)} of {NODES} nodes are here"]
        return [
            f"{topic.topic}/{partition.id}"
            for topic in found.topics.values()
            for partition in topic.partitions.values()
            if len(partition.isrs) < len(partition.replicas) or partition.leader < 0
        ]

    def leader(self, topic: str, partition: int) -> ClusterNode:
        """The node that leads the partition now.

        Raises:
            ServerFailed: no node leads it, or there is no such partition.
        """
        found = self._admin().list_topics(topic, timeout=10).topics[topic].partitions.get(partition)
        leading = [node for node in self.nodes if found and node.node == found.leader]
        if not leading:
            raise ServerFailed(f"Kafka: nobody leads {topic}/{partition}")
        return leading[0]

    def coordinator(self, what: Coordinated, name: str) -> ClusterNode:
        """The node that coordinates the group or transactional id `name`: the leader of the partition it hashes to.

        Raises:
            ServerFailed: the topic of coordinators does not exist yet.
        """
        topic = _COORDINATORS[what]
        partitions = len(self._admin().list_topics(topic, timeout=10).topics[topic].partitions)
        return self.leader(topic, coordinator_partition(name, max(1, partitions)))

    def elect_preferred(self, topic: str) -> None:
        """Make the preferred replica of every partition of `topic` its leader.

        Raises:
            KafkaException: the cluster refused.
        """
        admin = self._admin()
        partitions = [
            TopicPartition(topic, each) for each in admin.list_topics(topic, timeout=10).topics[topic].partitions
        ]
        elected = admin.elect_leaders(ElectionType.PREFERRED, partitions).result(20)
        for error in elected.values():
            if error is not None and error.code() != KafkaError.ELECTION_NOT_NEEDED:
                raise KafkaException(error)

    def _admin(self) -> AdminClient:
        config: dict[str, Any] = {"bootstrap.servers": self.bootstrap_servers, "logger": LIBRARY_LOGGER}
        return AdminClient(config)
