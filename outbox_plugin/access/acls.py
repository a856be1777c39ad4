"""A role's rights in Kafka, as commands that an administrator runs. No I/O.

The resource types, operations and pattern types are those of Kafka's `kafka-acls.sh` (Kafka documentation,
"Authorization and ACLs").
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from outbox_plugin.access.roles import Role
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.core.coordinator_partition import TRANSACTION_STATE_TOPIC
from outbox_plugin.errors import UserError
from outbox_plugin.settings import Settings

PREFIX_MARK = "*"  # At the end of a topic or group, it means all names with that prefix.


class Acl(NamedTuple):
    """A right to use one resource or, if `prefixed`, all whose names begin with `name`."""

    resource: str  # The option of kafka-acls.sh: topic, group or transactional-id.
    name: str
    operations: tuple[str, ...]
    prefixed: bool = False

    def command(self, principal: str) -> str:
        """The shell command that adds it for `principal`, such as `User:outbox`."""
        pattern = ["--resource-pattern-type", "prefixed"] if self.prefixed else []
        operations = [part for operation in self.operations for part in ("--operation", operation)]
        arguments = ["--allow-principal", principal, *operations, f"--{self.resource}", self.name, *pattern]
        return f'kafka-acls.sh --bootstrap-server "$BOOTSTRAP_SERVERS" --add {shlex.join(arguments)}'


def kafka_acls(settings: Settings, role: Role, topics: Sequence[str] = (), groups: Sequence[str] = ()) -> list[Acl]:
    """The rights that `role` needs in Kafka; empty for roles that use only Postgres.

    Args:
        settings: name the outbox's group and its delivery.
        role: what the program or the person does.
        topics: the topics of the events: names, or prefixes that end with `*`.
        groups: the consumer groups of inboxes, in the same form; only for the role inbox.

    Raises:
        UserError: the role needs topics or groups, and none were given.
    """
    names = KafkaNames.of(settings)
    match role:
        case Role.HARVESTER:
            return [*_of(role, "topic", topics, "Write", "Describe"), *_own(settings, names)]
        case Role.INBOX:
            consumed = [*_of(role, "topic", topics, "Read", "Describe"), *_of(role, "group", groups, "Read")]
            return [*consumed, _readers(names)]
        case Role.MONITOR | Role.OPERATOR:
            heartbeats = Acl("topic", names.leader_topic, ("Read", "Describe"))
            return [heartbeats, _readers(names), *(_acl("topic", topic, "Read", "Describe") for topic in topics)]
        case _:
            return []


def _own(settings: Settings, names: KafkaNames) -> list[Acl]:
    """A harvester's rights for the election and the progress records. It needs Alter to add partitions for shards."""
    topic = ("Read", "Write", "Describe", "Create", "Alter")
    election = [Acl("topic", names.leader_topic, topic), Acl("group", names.leader_group, ("Read",))]
    if settings.delivery == "at-least-once":
        return election
    return [
        *election,
        Acl("topic", names.progress_topic, (*topic, "DescribeConfigs", "AlterConfigs")),
        Acl("transactional-id", f"{names.group}-", ("Write", "Describe"), prefixed=True),
        Acl("topic", TRANSACTION_STATE_TOPIC, ("Describe", "DescribeConfigs")),  # To say why a transaction waits.
    ]


def _readers(names: KafkaNames) -> Acl:
    """Our readers join no group, but the client requires one, and looks up its coordinator."""
    return Acl("group", f"{names.group}-", ("Describe",), prefixed=True)


def _of(role: Role, resource: str, names: Sequence[str], *operations: str) -> list[Acl]:
    if not names:
        raise UserError(f"grants: the role {role} needs --{resource}, once for each {resource} (a name, or prefix*)")
    return [_acl(resource, name, *operations) for name in names]


def _acl(resource: str, name: str, *operations: str) -> Acl:
    prefixed = name.endswith(PREFIX_MARK) and name != PREFIX_MARK
    return Acl(resource, name.removesuffix(PREFIX_MARK) if prefixed else name, operations, prefixed)
