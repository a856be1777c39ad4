"""Where an outbox is: what tells two outboxes apart. It loads no Dagster, because the harvester's daemon uses it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

from outbox_plugin.settings import Settings


class OutboxAddress(NamedTuple):
    """An outbox's database, table and group. Two texts that libpq takes for the same database give the same address.

    Attributes:
        server: its hosts, or the name of a service of libpq's; empty for a socket on this machine.
        port: its port, or a port for each host.
        database: its name.
        table: the outbox's table, without the schema `public`.
        group: the name that the outbox's harvesters share.
    """

    server: str
    port: str
    database: str
    table: str
    group: str


def outbox_address(settings: Settings) -> OutboxAddress:
    """Where the outbox is. What its URI leaves out is taken from libpq's variables (`PGHOST`, …), as libpq does."""
    given = {name: str(value) for name, value in conninfo_to_dict(settings.dsn.get_secret_value()).items() if value}
    known = {**libpq_environment(), **given}
    hosts = known.get("hostaddr") or known.get("host") or ""  # As libpq, which connects to the address.
    server = ",".join(sorted(hosts.lower().split(",")))
    if service := known.get("service"):
        server = f"{_service(service)} {server}".rstrip()
    return OutboxAddress(
        server,
        known.get("port", "").strip(",") or "5432",
        known.get("dbname") or known.get("user") or "",
        settings.table.removeprefix("public."),
        settings.group,
    )


def libpq_environment() -> dict[str, str]:
    """The parameters of a connection that environment variables of libpq's give, such as `host` by `PGHOST`."""
    variables = [(each.keyword.decode(), each.envvar.decode()) for each in Conninfo.get_defaults() if each.envvar]
    return {keyword: os.environ[variable] for keyword, variable in variables if os.environ.get(variable)}


def _service(name: str) -> str:
    """A service, with its file if a variable names that: each file has services of its own."""
    file = os.environ.get("PGSERVICEFILE")
    return f"service {name} of {Path(file).absolute()}" if file else f"service {name}"
