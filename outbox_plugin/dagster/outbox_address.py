"""Where an outbox is: what tells two outboxes apart. It loads no Dagster, because the harvester's daemon uses it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo, PGconn

from outbox_plugin.settings import Settings

_WORD, _ESCAPED = re.compile(r"(?:\\.|\S)+", re.DOTALL), re.compile(r"\\(.)", re.DOTALL)
_SCHEMA = re.compile(r"[^\W\d][\w$]*", re.ASCII)  # One name, without quotes.


class OutboxAddress(NamedTuple):
    """An outbox's database, table and group. Texts that libpq takes for the same servers give the same address.

    Two outboxes never have the same address: otherwise one's daemon would wait for the other's for ever. One outbox may
    have two: then each has a daemon, and one stands by. So two texts whose servers cannot be compared here, such as a
    name and its alias, are two addresses.

    Attributes:
        server: its hosts, or the folder of the socket on this machine; with the name of a service of libpq's.
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
    service = _service(known["service"]) if "service" in known else ""
    user = known.get("user") or ("" if service else _user_of_this_process())
    servers = _servers(known, "" if service else _socket_folder())
    hosts, ports = (list(each) for each in zip(*servers, strict=True))
    return OutboxAddress(
        f"{service} {','.join(hosts)}".strip(),
        ",".join(ports if len(set(ports)) > 1 else ports[:1]),
        known.get("dbname") or user,
        _table(settings.table, _search_path(known.get("options", "")), user),
        settings.group,
    )


def _servers(known: Mapping[str, str], default: str) -> list[tuple[str, str]]:
    """Each host with its port, in an order that does not depend on the text's: libpq tries one after the other.

    Args:
        known: the parameters of the connection.
        default: the host where none is named.
    """
    names, addresses = known.get("host", "").split(","), known.get("hostaddr", "").split(",")
    count = len(addresses) if "hostaddr" in known else len(names)
    ports = known.get("port", "").split(",")
    ports *= count if len(ports) == 1 else 1
    # As libpq, which connects to the address if there is one.
    hosts = [address or name for address, name in zip_longest(addresses, names, fillvalue="")]
    pairs = zip_longest(hosts[:count], ports[:count], fillvalue="")
    return sorted({(_host(host or default), port or "5432") for host, port in pairs})


def _host(name: str) -> str:
    """The name of a host, in one form. It may be the folder of a socket, whose name has cases."""
    if name.startswith("/"):
        return os.path.realpath(name)
    return name if name.startswith("@") else name.lower()


@cache
def _socket_folder() -> str:
    """Where libpq looks for the socket of this machine. Only a connection tells; no server listens at port 1."""
    connection = PGconn.connect_start(b"host='' hostaddr='' port=1")
    try:
        return connection.host.decode()
    finally:
        connection.finish()


def _user_of_this_process() -> str:
    """The user that libpq connects as where none is named."""
    return next((each.val.decode() for each in Conninfo.get_defaults() if each.keyword == b"user" and each.val), "")


def _table(name: str, search_path: str | None, user: str) -> str:
    """The table's name, without the schema `public`.

    Args:
        name: with a schema, or without one.
        search_path: that the connection sets; None if it sets none.
        user: of the connection, after whom a schema of the search_path may be named.
    """
    if "." not in name and search_path is not None:
        if _SCHEMA.fullmatch(search_path):
            name = f"{search_path.lower()}.{name}"
        else:  # Only the database knows which of the schemas has the table.
            of_user = f" of {user}" if "$user" in search_path else ""
            return f"{name} (search_path {search_path}{of_user})"
    return name.removeprefix("public.")


def _search_path(options: str) -> str | None:
    """The `search_path` that the parameter `options` of a connection sets; None if it sets none."""
    words = [_ESCAPED.sub(r"\1", word) for word in _WORD.findall(options)]
    found = None
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        setting = following if word == "-c" else word[2:] if word.startswith(("-c", "--")) else ""
        name, _, value = setting.partition("=")
        if name.strip().lower().replace("-", "_") == "search_path":
            found = value.strip()
    return found


def libpq_environment() -> dict[str, str]:
    """The parameters of a connection that environment variables of libpq's give, such as `host` by `PGHOST`."""
    variables = [(each.keyword.decode(), each.envvar.decode()) for each in Conninfo.get_defaults() if each.envvar]
    return {keyword: os.environ[variable] for keyword, variable in variables if os.environ.get(variable)}


def _service(name: str) -> str:
    """A service, with its file if a variable names that: each file has services of its own."""
    file = os.environ.get("PGSERVICEFILE")
    return f"service {name} of {Path(file).absolute()}" if file else f"service {name}"
