"""A role that may create objects in the outbox's schema. It plants functions that unqualified names would call."""

from __future__ import annotations

import re
from itertools import product

import psycopg
from psycopg import sql

from outbox_plugin.schema.migrate import migrations
from outbox_plugin.schema.qualify import qualified
from tests.unit.test_qualified_sql import statements

ROLE = "hostile"
_BODY = """LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_catalog.nextval('hostile.calls');
    RAISE EXCEPTION 'somebody else''s code ran as %', current_user;
END $$"""
_FUNCTIONS = """
SELECT proname, pg_get_function_arguments(oid), CASE WHEN proretset THEN 'SETOF ' ELSE '' END || prorettype::regtype,
       pronargs
FROM pg_proc
WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY (%s) AND provariadic = 0
  AND NOT proargtypes::oid[] && ARRAY['internal', 'cstring', '"any"', 'anyrange', 'anymultirange']::regtype[]::oid[]
"""
_OPERATORS = """
SELECT DISTINCT oprname, oprleft::regtype::text, oprright::regtype::text, oprresult::regtype::text
FROM pg_operator
WHERE oprname = ANY (%s) AND oprleft <> 0 AND NOT ARRAY[oprleft, oprright] && ARRAY(
    SELECT oid FROM pg_type WHERE typtype = 'p'
)
"""
_TEXTS = ("text", "varchar", "name", "bpchar")


def plant(dsn: str) -> int:
    """As the hostile role, make overloads of all functions and operators that our SQL uses; returns how many.

    They have the types of Postgres's own, which a search_path with pg_catalog at its end prefers, and those that fit a
    column of goharvest's better. Each counts its calls in a sequence, which no rollback undoes, and fails.
    """
    made = 0
    functions, operators = used()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA hostile; CREATE SEQUENCE hostile.calls")
        connection.execute("GRANT USAGE ON SCHEMA hostile TO PUBLIC; GRANT ALL ON SEQUENCE hostile.calls TO PUBLIC")
        found = connection.execute(_FUNCTIONS, [sorted(functions)]).fetchall()
        combined = connection.execute(_OPERATORS, [sorted(operators)]).fetchall()
        connection.execute(f"SET ROLE {ROLE}")
        for name, arguments, result, count in found:
            made += _made(connection, f"CREATE FUNCTION public.{name}({_plain(arguments)}) RETURNS {result} {_BODY}")
            for kind in ("varchar", "int"):
                rest = ", ".join([kind] + ["int"] * (count - 1)) if count else kind
                made += _made(connection, f"CREATE FUNCTION public.{name}({rest}) RETURNS {result} {_BODY}")
        combined += [
            (name, left, right, "bool") for name in ("=", "<>", "<", ">", "<=") for left in _TEXTS for right in _TEXTS
        ]
        results = dict.fromkeys(("=", "<>", "<", ">", "<="), "bool") | {"||": "text"}
        combined += [(name, *types, result) for name, result in results.items() for types in product(_TEXTS, repeat=2)]
        for number, (name, left, right, result) in enumerate(combined):
            function = f"public.operator_{number}"
            _made(connection, f"CREATE FUNCTION {function}({left}, {right}) RETURNS {result} {_BODY}")
            operator = f"CREATE OPERATOR public.{name} (FUNCTION = {function}, LEFTARG = {left}, RIGHTARG = {right})"
            made += _made(connection, operator)
        for types in ("varchar", "varchar, varchar", "bytea, varchar", "text, varchar"):
            for name in ("outbox_value", "outbox_bytes"):
                made += _made(connection, f"CREATE FUNCTION public.{name}({types}) RETURNS bytea {_BODY}")
        connection.execute(f"CREATE FUNCTION public.stolen() RETURNS bool {_BODY}")
        for kind in ("text", "uuid", "bytea", "timestamptz", "regclass", "oid", "xid", "jsonb", "float8"):
            made += _made(connection, f"CREATE DOMAIN public.{kind} AS pg_catalog.{kind} CHECK (public.stolen())")
        for catalog in ("class", "locks", "database", "attribute", "proc", "namespace", "trigger", "roles", "sequence"):
            view = f"public.pg_{catalog} AS SELECT *, public.stolen() FROM pg_catalog.pg_{catalog}"
            made += _made(connection, f"CREATE VIEW {view}")
    return made


def calls(dsn: str) -> int:
    """How often the planted functions and operators have run."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM hostile.calls").fetchone()
    return int(row[0]) if row else -1


def used() -> tuple[set[str], set[str]]:
    """The names of the functions and operators of Postgres's that our statements and functions use."""
    everything = "".join([*map(qualified, statements().values()), *migrations().values()]).replace("%%", "%")
    patterns = (r"pg_catalog\.(\w+)\(", r"OPERATOR\(pg_catalog\.(.+?)\)")
    functions, operators = (set(re.findall(pattern, everything)) for pattern in patterns)
    return functions, operators


def _plain(arguments: str) -> str:
    return re.sub(r" DEFAULT [^,]+", "", arguments)


def _made(connection: psycopg.Connection, statement: str) -> bool:
    """Run a statement. Returns whether the server accepted it, because some combinations do not exist."""
    try:
        connection.execute(sql.SQL(statement.replace("{", "{{").replace("}", "}}")).format())
    except psycopg.Error:
        return False
    return True
