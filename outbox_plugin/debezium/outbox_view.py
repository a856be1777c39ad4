"""The SQL that turns Debezium's outbox table into an outbox: columns for the order, and a view. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from psycopg import sql

from outbox_plugin.core.whole_record import MAX_HEX_BYTES, WHOLE_RECORD_HEADER
from outbox_plugin.debezium.event_router import PAYLOAD_FIELD, EventRouter, Form, InvalidConnector
from outbox_plugin.schema.statements import identifier
from outbox_plugin.schema.whole_records import COLUMNS

PLACE, CREATED_AT, LEADER = "outbox_place", "outbox_created_at", "outbox_leader"
_PLACE, _CREATED_AT, _LEADER = map(sql.Identifier, (PLACE, CREATED_AT, LEADER))
_LEAVE_PUBLICATION = "ALTER PUBLICATION {publication} DROP TABLE {base}"
_LONGEST_NAME = 63  # The largest number of bytes in a name in Postgres.
_SHORT_WAITS = "SET lock_timeout = '2s'"  # Because writers of the table wait behind us.
_UTF_8 = "SET client_encoding = 'UTF8'"  # psql may take the file to be in the encoding of the database or the terminal.
# Names without a schema mean Postgres's own objects, whatever others may create in the owner's search_path.
_TRUST_NOBODY, _TRUST_AGAIN = "SET search_path = pg_catalog, pg_temp", "RESET search_path"
_PLAIN_TEXT = frozenset({"text", "character varying", "uuid", "json", "jsonb"})
_WHOLE_NUMBERS = frozenset({"smallint", "integer", "bigint"})
_NUMERIC = re.compile(r"numeric\(\d+,[0-6]\)")  # Java writes smaller fractions with an exponent.
_MILLISECONDS = re.compile(r"timestamp\([0-3]\) without time zone")
_EPOCH = "CASE WHEN isfinite({0}) THEN trunc(extract(epoch FROM {0}) * %s)::text END"
# Kafka takes no timestamp before 1970, and the harvester none after the year 9999. NULL: the time of publication.
_TIMESTAMP = (
    "CASE WHEN {0} >= TIMESTAMP '1970-01-01 00:00:00.001'\n             AND {0} < TIMESTAMP '10000-01-01' "
    "THEN {0} AT TIME ZONE 'UTC' END"
)
# As `core.whole_record.ordering_key` makes it, but that keys which are texts are written in hexadecimal, too.
_ORDERING_KEY = (
    f"CASE WHEN octet_length({{0}}) <= {MAX_HEX_BYTES} THEN 'hex:' || encode({{0}}, 'hex') "
    "ELSE 'sha256:' || encode(sha256({0}), 'hex') END"
)
# By column type, the text that Debezium, with its defaults, and Kafka Connect's header converter make of a value.
# JSON has some of it in quotes. There is none for an infinite date or time: the header has no value.
_AS_TEXT = {
    **dict.fromkeys((*_PLAIN_TEXT, *_WHOLE_NUMBERS, "boolean"), "{}::text"),
    "date": "CASE WHEN isfinite({0}) THEN ({0} - DATE '1970-01-01')::text END",
    "timestamp without time zone": _EPOCH % 1_000_000,
    "timestamp with time zone": "to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')",
}


_TEXT_IN_JSON = {*_PLAIN_TEXT, "timestamp with time zone"}
_PLACEMENT = "table.fields.additional.placement"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table or a view.

    Attributes:
        name: its name.
        type: its type, in Postgres's notation.
        is_generated: whether Postgres generates its value.
        collation: the collation of its texts, in Postgres's notation; None for the database's.
    """

    name: str
    type: str
    is_generated: bool = False
    collation: str | None = None

    @property
    def base_type(self) -> str:
        """The type without its length or precision."""
        return re.sub(r"\(.*?\)", "", self.type)


class OutboxView:
    """Composes the statements for one table and one view."""

    def __init__(
        self,
        router: EventRouter,
        columns: Sequence[Column],
        writers: Sequence[str],
        view: Sequence[str],
        present: Sequence[Column] = (),
    ) -> None:
        """Check that the table has the columns that the router reads, with supported types.

        Args:
            router: how a row becomes a record.
            columns: the table's columns, in their order.
            writers: the roles that may insert into it, other than its owner; PUBLIC may be one.
            view: the schema and the name of the view.
            present: the columns of the view that is there by this name. It keeps them, because Postgres cannot drop
                columns of a view.

        Raises:
            InvalidConnector: a column is missing, or has a type that cannot be written as the converters write it.
        """
        self._router = router
        self._columns = {column.name: column for column in columns}
        self._base = identifier((router.schema, router.table))
        self._writers = writers
        self._view = identifier(view)
        self._had_whole_records = {column.name for column in present} >= set(COLUMNS)
        self.sequence = sql.Identifier(router.schema, _shortened(router.table, "_outbox_place_seq")).as_string()
        self._sequence = self._named("_outbox_place_seq")
        self._next_place = sql.SQL("pg_catalog.nextval({})").format(sql.Literal(self.sequence))
        self._made = self._composed_columns()
        self._present = present

    @property
    def differences(self) -> list[str]:
        """How the records differ from Debezium's bytes, one sentence for each difference."""
        router, found = self._router, []
        if router.expands_json:
            found.append(
                "Debezium omits spaces, null fields and empty arrays from an expanded payload, and writes some numbers "
                "differently; here the value is the payload as Postgres writes it."
            )
        elif Form.JSON in (router.key_form, router.value_form):
            found.append(
                "Kafka Connect writes emoji, and other characters outside Unicode's first plane, as \\u escapes, and "
                "escapes of control characters in capitals; here they are written differently, with the same meaning."
            )
        if router.timestamp_column:
            found.append(
                "A timestamp before 1970, after the year 9999, or that is infinite becomes the time of publication."
            )
        return found

    @property
    def makes_whole_records(self) -> bool:
        """Whether only the columns of whole records can hold the records, or the view that is there has them.

        Bytes as keys, timestamps and partitions need them.
        """
        router = self._router
        needed = router.key_form is Form.BYTES or bool(router.timestamp_column or router.partition_column)
        return needed or self._had_whole_records

    def preparation(self) -> list[sql.Composed]:
        """Statements that the table's owner runs once, one by one. No row gets a place yet, and Debezium goes on.

        Raises:
            InvalidConnector: Postgres cannot replace the view that is there by the new one.
        """
        self._check_replacement()
        names = {
            "base": self._base,
            "sequence": self._sequence,
            "index": identifier((_shortened(self._router.table, "_outbox_place_key"),)),
            "place": _PLACE,
            "created_at": _CREATED_AT,
            "leader": _LEADER,
        }
        texts = (
            _UTF_8,
            _TRUST_NOBODY,
            _SHORT_WAITS,
            "ALTER TABLE {base}\n    ADD COLUMN IF NOT EXISTS {place} BIGINT,\n"
            "    ADD COLUMN IF NOT EXISTS {created_at} TIMESTAMPTZ,\n    ADD COLUMN IF NOT EXISTS {leader} UUID",
            "CREATE SEQUENCE IF NOT EXISTS {sequence} OWNED BY {base}.{place}",
            "SET lock_timeout = 0",  # Nobody waits behind the next statement. If cancelled, it leaves an invalid index.
            "CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS {index} ON {base} ({place})",
            _SHORT_WAITS,
        )
        grant = "GRANT USAGE ON SEQUENCE {} TO {}"
        return [
            *(sql.SQL(text).format(**names) for text in texts),
            *(sql.SQL(grant).format(self._sequence, _role(role)) for role in self._writers),
            self._made_view(),
            self._view_default(),
            *self._placing_function(),
            *self._keeping_function(),
            self._keeping_trigger(),
            sql.SQL("ALTER TABLE {} ENABLE ALWAYS TRIGGER outbox_kept").format(self._base),
            sql.SQL(_TRUST_AGAIN).format(),
        ]

    def switch(self) -> list[sql.Composed]:
        """Statements after which new rows are relayed from the view, and no longer by Debezium.

        Run them in one transaction. It waits for open transactions that have written to the table: Debezium relays
        their rows.

        Raises:
            InvalidConnector: the connector reads no publication.
        """
        placed = (
            "ALTER TABLE {base}\n    ALTER COLUMN {place} SET DEFAULT {next},\n"
            "    ALTER COLUMN {created_at} SET DEFAULT now()"
        )
        trigger = (
            "CREATE OR REPLACE TRIGGER outbox_placed BEFORE INSERT ON {base} FOR EACH ROW\n"
            "WHEN (NEW.{place} IS NULL OR NEW.{created_at} IS NULL) EXECUTE FUNCTION {function}()"
        )
        names = {
            "base": self._base,
            "place": _PLACE,
            "created_at": _CREATED_AT,
            "next": self._next_place,
            "function": self._placing(),
            "publication": self._publication(),
        }
        always = "ALTER TABLE {base} ENABLE ALWAYS TRIGGER outbox_placed"
        return [sql.SQL(text).format(**names) for text in (placed, trigger, always, _LEAVE_PUBLICATION)]

    def deletion(self) -> list[sql.Composed]:
        """Statements that fail if rows could not be marked or deleted after the switch. Roll them back."""
        texts = (
            _SHORT_WAITS,
            f"DO $$BEGIN {_LEAVE_PUBLICATION}; EXCEPTION WHEN undefined_object THEN END$$",  # It may have left before.
            "EXPLAIN UPDATE {base} SET {leader} = NULL",
            "EXPLAIN DELETE FROM {base}",
        )
        names = {"publication": self._publication(), "base": self._base, "leader": _LEADER}
        return [sql.SQL(text).format(**names) for text in texts]

    def _publication(self) -> sql.Composable:
        """The connector's publication. Raises InvalidConnector if it reads none."""
        if self._router.publication is None:
            raise InvalidConnector(
                "plugin.name: expected 'pgoutput': another plug-in has no publication that the table could leave"
            )
        return identifier((self._router.publication,))

    def _made_view(self) -> sql.Composed:
        return sql.SQL("CREATE OR REPLACE VIEW {} AS\n{}").format(self._view, self._composed_select())

    def _view_default(self) -> sql.Composed:
        return sql.SQL("ALTER VIEW {} ALTER COLUMN id SET DEFAULT {}").format(self._view, self._next_place)

    def _placing_function(self) -> list[sql.Composed]:
        """A trigger function that fills in the defaults for writers that insert NULL, such as COPY from a dump."""
        text = (
            "CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql\n"
            "SET search_path = pg_catalog, pg_temp AS $placed$\nBEGIN\n"
            "    NEW.{place} := coalesce(NEW.{place}, {next});\n"
            "    NEW.{created_at} := coalesce(NEW.{created_at}, now());\n    RETURN NEW;\nEND $placed$"
        )
        names = {"function": self._placing(), "place": _PLACE, "created_at": _CREATED_AT, "next": self._next_place}
        return [sql.SQL(text).format(**names), _only_ours(self._placing())]

    def _keeping_function(self) -> list[sql.Composed]:
        """A trigger function that puts back rows which are deleted in the transaction that inserted them.

        Many applications do that, because Debezium reads the WAL. But a row must stay until it is relayed. The function
        looks up the columns when it is called, because they may be altered.
        """
        text = (
            "CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql\n"
            "SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $keep$\n"
            "DECLARE\n    stored text := (\n        SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum)\n"
            "        FROM pg_attribute\n"
            "        WHERE attrelid = TG_RELID AND attnum > 0 AND NOT attisdropped AND attgenerated = '');\nBEGIN\n"
            "    EXECUTE format('INSERT INTO %s (%s) OVERRIDING SYSTEM VALUE '\n"
            "                   'SELECT %s FROM (SELECT ($1).*) AS deleted', TG_RELID::regclass, stored, stored)\n"
            "    USING OLD;\n    RETURN NULL;\nEND $keep$"
        )
        return [sql.SQL(text).format(function=self._keeping()), _only_ours(self._keeping())]

    def _keeping_trigger(self) -> sql.Composed:
        return sql.SQL(
            "CREATE OR REPLACE TRIGGER outbox_kept AFTER DELETE ON {base}\n"
            "FOR EACH ROW WHEN (OLD.{created_at} = transaction_timestamp()) EXECUTE FUNCTION {function}()"
        ).format(base=self._base, created_at=_CREATED_AT, function=self._keeping())

    def _placing(self) -> sql.Composable:
        return self._named("_outbox_placed")

    def _keeping(self) -> sql.Composable:
        return self._named("_outbox_kept")

    def _named(self, suffix: str) -> sql.Composable:
        return identifier((self._router.schema, _shortened(self._router.table, suffix)))

    def _check_replacement(self) -> None:
        """Raises InvalidConnector if Postgres could not replace the view that is there by the new one."""
        made, collations = list(self._made), self._collations()
        types = {"kafka_value": "bytea" if self._router.value_form is Form.BYTES else "text"}
        for place, column in enumerate(self._present):
            has_type = made[place : place + 1] == [column.name] and types.get(column.name, column.type) == column.type
            if has_type and collations.get(column.name) == column.collation:
                continue
            form = f"collation {column.collation or 'of the database'}" if has_type else f"type {column.type}"
            raise InvalidConnector(
                f"OUTBOX_TABLE: the view {self._view.as_string()} has the column {column.name!r} of the {form}, which "
                "Postgres cannot replace by what this connector needs: stop the harvesters, drop the view, run this "
                "command again and its SQL, then `outbox migrate` and the SQL of `outbox grants`"
            )

    def _collations(self) -> dict[str, str | None]:
        """The collations that Postgres gives to columns of the view, unless they are the database's.

        A text that is cast to another type of text keeps its collation. Of several texts, one of another collation than
        the database's decides.
        """
        router = self._router
        texts = {"kafka_topic": [router.route_column]}
        if router.key_form is Form.TEXT:
            texts["kafka_key"] = [router.key_column]
        if router.value_form is Form.TEXT or router.expands_json:
            texts["kafka_value"] = [router.payload_column]
        if not self.makes_whole_records:
            texts["kafka_header_values"] = [column for _, column in self._header_columns()]
        collations = {name: [self._columns[column].collation for column in columns] for name, columns in texts.items()}
        return {name: next(filter(None, found), None) for name, found in collations.items()}

    def _composed_columns(self) -> dict[str, sql.Composable]:
        return {
            "id": _PLACE,
            "create_time": _CREATED_AT,
            "kafka_topic": self._topic(),
            "kafka_key": self._key(),
            "kafka_value": self._value(),
            **self._headers(),
            "leader_id": _LEADER,
            "xmin": sql.SQL("xmin"),
            **(self._whole_record() if self.makes_whole_records else {}),
        }

    def _composed_select(self) -> sql.Composed:
        # `CREATE OR REPLACE VIEW` can only add columns behind those that a view has.
        return sql.SQL("SELECT {columns}\nFROM {base}\nWHERE {place} IS NOT NULL").format(
            columns=sql.SQL(",\n       ").join(
                sql.SQL(f"{{}} AS {name}").format(expression) for name, expression in self._made.items()
            ),
            base=self._base,
            place=_PLACE,
        )

    def _topic(self) -> sql.Composable:
        column = self._column("route.by.field", self._router.route_column)
        if column.base_type not in ("text", "character varying"):
            raise InvalidConnector(
                f"route.by.field: the column {column.name!r} is of the type {column.type}, expected a text"
            )
        prefix, suffix = (
            [sql.Literal(text)] if text else [] for text in (self._router.topic_prefix, self._router.topic_suffix)
        )
        return sql.SQL(" || ").join([*prefix, sql.SQL("{}::text").format(identifier((column.name,))), *suffix])

    def _key(self) -> sql.Composable:
        key = self._written("key.converter", self._router.key_column, self._router.key_form)
        return sql.SQL(_ORDERING_KEY).format(key) if self._router.key_form is Form.BYTES else key

    def _value(self) -> sql.Composable:
        router = self._router
        if router.expands_json and router.value_form is not Form.JSON:
            raise InvalidConnector(
                "table.expand.json.payload: expected value.converter to be the JsonConverter, as an expanded payload "
                "is not a text"
            )
        if router.envelope and router.value_form is not Form.JSON:
            raise InvalidConnector(
                f"{_PLACEMENT}: expected value.converter to be the JsonConverter, as an envelope is not a text"
            )
        form = router.value_form
        value = self._written("value.converter", router.payload_column, form)
        if router.expands_json:  # Debezium expands payloads that begin like an object or an array.
            payload = identifier((router.payload_column,))
            value = sql.SQL("CASE WHEN {0}::text ~ '^[{{[]' THEN {0}::text ELSE {1} END").format(payload, value)
        if router.envelope:
            value = self._in_envelope(value)
        if not router.blank_is_tombstone or form is Form.BYTES:
            return value
        # To Java's trim(), the space and all characters with smaller codes are blanks.
        blank = sql.SQL("coalesce({}::text, '') !~ '[^\x01-\x20]'").format(identifier((router.payload_column,)))
        return sql.SQL("CASE WHEN {} THEN NULL ELSE {} END").format(blank, value)

    def _in_envelope(self, payload: sql.Composable) -> sql.Composable:
        """An object with the payload and the other columns, as the JsonConverter writes it."""
        parts = [sql.Literal(f'{{"{PAYLOAD_FIELD}":'), payload]
        for field in self._router.envelope:
            column = self._column(_PLACEMENT, field.column)
            if column.base_type not in _AS_TEXT:  # A number with a fraction is written in Base64, for example.
                raise _unwritable(column)
            is_text = column.base_type in _TEXT_IN_JSON
            written = "coalesce(to_json({})::text, 'null')" if is_text else "coalesce({}, 'null')"
            name = sql.Literal(f",{json.dumps(field.name, ensure_ascii=False)}:")
            parts += name, sql.SQL(written).format(self._as_text(field.column))
        return sql.SQL(" || ").join([*parts, sql.Literal("}")])

    def _written(self, converter: str, name: str, form: Form) -> sql.Composable:
        column = self._column(converter, name)
        is_text, is_number = column.base_type in _PLAIN_TEXT, column.base_type in _WHOLE_NUMBERS
        if form is Form.BYTES and column.base_type == "bytea":
            written = "{}"
        elif form is Form.TEXT and (is_text or is_number):
            written = "{}::text"
        elif form is Form.JSON and is_text:
            written = "coalesce(to_json({}::text)::text, 'null')"
        elif form is Form.JSON and is_number:
            written = "coalesce({}::text, 'null')"
        else:
            raise InvalidConnector(
                f"{converter}: writes the column {name!r}, of the type {column.type}, in a form that is not supported"
            )
        return sql.SQL(written).format(identifier((name,)))

    def _headers(self) -> dict[str, sql.Composable]:
        """The names of the headers, and their texts. A column that is NULL becomes a header without a value."""
        names = [sql.Literal(header) for header, _ in self._header_columns()]
        if not self.makes_whole_records:
            return {"kafka_header_keys": _array(names), "kafka_header_values": _array(self._header_texts())}
        marked = [sql.Literal(WHOLE_RECORD_HEADER), *names]
        return {"kafka_header_keys": _array(marked), "kafka_header_values": sql.SQL("ARRAY[]::text[]")}

    def _whole_record(self) -> dict[str, sql.Composable]:
        """The columns of whole records: keys that are bytes, the values of all headers, and the timestamp."""
        has_bytes = self._router.key_form is Form.BYTES
        as_bytes = [sql.SQL("convert_to({}, 'UTF8')").format(text) for text in self._header_texts()]
        return {
            "kafka_key_bytes": identifier((self._router.key_column,)) if has_bytes else sql.SQL("NULL::bytea"),
            "kafka_value_bytes": sql.SQL("NULL::bytea"),
            "kafka_header_bytes": _array(as_bytes),
            "kafka_partition": self._partition(),
            "kafka_timestamp": self._timestamp(),
        }

    def _partition(self) -> sql.Composable:
        if self._router.partition_column is None:
            return sql.SQL("NULL::integer")
        column = self._column(_PLACEMENT, self._router.partition_column)
        if column.type != "integer":
            raise InvalidConnector(
                f"{_PLACEMENT}: the column {column.name!r} is of the type {column.type}; Debezium takes only an "
                "integer as the partition"
            )
        return identifier((column.name,))

    def _timestamp(self) -> sql.Composable:
        if self._router.timestamp_column is None:
            return sql.SQL("NULL::timestamptz")
        name = "table.field.event.timestamp"
        column = self._column(name, self._router.timestamp_column)
        if column.base_type != "timestamp without time zone":
            raise InvalidConnector(
                f"{name}: the column {column.name!r} is of the type {column.type}; Debezium takes only a timestamp "
                "without time zone"
            )
        return sql.SQL(_TIMESTAMP).format(identifier((column.name,)))

    def _header_columns(self) -> list[tuple[str, str]]:
        return [("id", self._router.id_column), *((each.name, each.column) for each in self._router.headers)]

    def _header_texts(self) -> list[sql.Composable]:
        return [self._as_text(column) for _, column in self._header_columns()]

    def _as_text(self, name: str) -> sql.Composed:
        column = self._column(_PLACEMENT, name)
        if _NUMERIC.fullmatch(column.type):
            return sql.SQL("{}::text").format(identifier((name,)))
        if _MILLISECONDS.fullmatch(column.type):
            return sql.SQL(_EPOCH % 1_000).format(identifier((name,)))
        if column.base_type not in _AS_TEXT:
            raise _unwritable(column)
        return sql.SQL(_AS_TEXT[column.base_type]).format(identifier((name,)))

    def _column(self, what: str, name: str) -> Column:
        if name not in self._columns:
            raise InvalidConnector(
                f"{what}: the table {self._router.schema}.{self._router.table} has no column {name!r}"
            )
        if self._columns[name].is_generated:
            raise InvalidConnector(
                f"{what}: the column {name!r} is generated, and Postgres sends no such column to Debezium: expected "
                "another column"
            )
        return self._columns[name]


def _unwritable(column: Column) -> InvalidConnector:
    return InvalidConnector(
        f"{_PLACEMENT}: the column {column.name!r} is of the type {column.type}, which cannot be written here as Kafka "
        "Connect does"
    )


def _array(parts: Sequence[sql.Composable]) -> sql.Composed:
    return sql.SQL("ARRAY[{}]").format(sql.SQL(", ").join(parts))


def _only_ours(function: sql.Composable) -> sql.Composed:
    """The statement that keeps other roles from using the function in triggers of their own."""
    return sql.SQL("REVOKE ALL ON FUNCTION {}() FROM PUBLIC").format(function)


def _shortened(table: str, suffix: str) -> str:
    """A name made of the table's and a suffix, in at most 63 bytes, because Postgres would cut a longer one.

    A name that is shortened contains a hash, because two long names may begin with the same letters.
    """
    if len(table.encode()) + len(suffix) > _LONGEST_NAME:
        suffix = f"_{sha256(table.encode()).hexdigest()[:8]}{suffix}"
    return table.encode()[: _LONGEST_NAME - len(suffix)].decode(errors="ignore") + suffix


def _role(name: str) -> sql.Composable:
    return sql.SQL("PUBLIC") if name == "PUBLIC" else identifier((name,))
