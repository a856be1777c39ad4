"""Topics of a cluster whose replicas are where a test wants them."""

from __future__ import annotations

from confluent_kafka.admin import AdminClient, NewTopic

from outbox_plugin.embedded.cluster import EmbeddedCluster


def create_on(cluster: EmbeddedCluster, topic: str, nodes: list[int]) -> str:
    """Make a topic of one partition, with a replica on each of `nodes` (from 0 on), all of which must be in sync."""
    replicas = [cluster.nodes[number].node for number in nodes]
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    config = {"min.insync.replicas": str(len(nodes))}
    made = NewTopic(topic, num_partitions=1, replica_assignment=[replicas], config=config)
    admin.create_topics([made])[topic].result(60)
    cluster.wait_in_sync()
    return topic
