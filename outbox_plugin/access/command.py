"""`outbox grants`: prints the statements by which an administrator gives a role exactly the rights that it needs."""

from __future__ import annotations

import re

import click

from outbox_plugin.access.acls import kafka_acls
from outbox_plugin.access.grants import postgres_grants
from outbox_plugin.access.roles import Role
from outbox_plugin.errors import UserError
from outbox_plugin.kafka_settings import kafka_settings
from outbox_plugin.schema.outboxes import present_outboxes
from outbox_plugin.settings import Settings

MAX_NAME_BYTES = 63  # Postgres cuts a longer name, which may then be another role's.
_TOPIC_OR_PREFIX = re.compile(r"[a-zA-Z0-9._-]{1,249}\*?|\*")


@click.command()
@click.option("--role", required=True, type=click.Choice([role.value for role in Role]), help="What the program does.")
@click.option("--to", "grantee", required=True, help="The Postgres role; with --kafka, the principal (User:name).")
@click.option("--kafka", is_flag=True, help="Print the ACLs for Kafka, as commands for kafka-acls.sh.")
@click.option("--topic", "topics", multiple=True, help="With --kafka: a topic of events, or prefix*; may be repeated.")
@click.option("--group", "groups", multiple=True, help="With --kafka: an inbox's group, or prefix*; may be repeated.")
def grants(role: str, grantee: str, kafka: bool, topics: tuple[str, ...], groups: tuple[str, ...]) -> None:
    """Print the SQL, or Kafka's ACLs, that give a role what it needs. Changes nothing."""
    if not kafka:
        if topics or groups:
            raise UserError("grants: --topic and --group are only for Kafka; add --kafka")
        if not 1 <= len(grantee.encode()) <= MAX_NAME_BYTES:
            raise UserError(
                f"grants: --to: expected the name of a Postgres role, of 1 to {MAX_NAME_BYTES} bytes "
                f"(given: {grantee!r})"
            )
        for settings in present_outboxes(Settings()):
            click.echo(postgres_grants(settings, Role(role), grantee))
        return
    if not grantee.removeprefix("User:") or not grantee.startswith("User:"):
        raise UserError(f"grants: expected a Kafka principal in the form User:name (given: {grantee!r})")
    for name in topics:
        if not _TOPIC_OR_PREFIX.fullmatch(name):
            raise UserError(
                "grants: --topic: expected a name of letters, digits, dots, dashes and underscores, or a prefix that "
                f"ends with * (given: {name!r})"
            )
    if not all(groups):
        raise UserError("grants: --group: expected the name of a consumer group, or a prefix that ends with *")
    outboxes = present_outboxes(_settings_for_kafka())
    acls = [acl for settings in outboxes for acl in kafka_acls(settings, Role(role), topics, groups)]
    for acl in dict.fromkeys(acls):
        click.echo(acl.command(grantee))
    if not acls:
        click.echo(f"# The role {role} does not use Kafka.")


def _settings_for_kafka() -> Settings:
    """The settings for Kafka's ACLs. OUTBOX_DSN is required only where several outboxes are looked up or listed."""
    settings = kafka_settings(None, None)
    return Settings() if settings.names_many or settings.outboxes else settings
