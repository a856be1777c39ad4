"""Nothing that our SQL runs can be replaced by a role that may create functions, operators or types somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from outbox_plugin.schema.migrate import migrations
from outbox_plugin.schema.qualify import qualified

NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
PARTS = {
    "table_name": "'t'",
    "shards": "1",
    "value_type": "pg_catalog.text",
    "value": "value",
    "does_not_fit": "false",
    "conditions": "",
    "more_columns": "",
    "replayed_columns": "",
    "keep_gone": "SELECT 1",
    "role": "a_role",
    "schema": "a_schema",
}


def statements() -> dict[str, str]:
    folder = files("outbox_plugin.schema").joinpath("queries")
    found: dict[str, str] = {}
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        _, *parts = NAME.split(file.read_text(encoding="utf-8"))
        found |= {f"{file.name}: {name}": text for name, text in zip(parts[::2], parts[1::2], strict=True)}
    return found


def filled(text: str) -> str:
    """A statement with something in the place of its parts and values, as a parser wants it."""
    text = re.sub(r"(?<!\{)\{quoted_\w+\}", "'q'", text)
    text = re.sub(r"(?<!\{)\{(\w+)\}", lambda part: PARTS.get(part[1], f"ours.{part[1]}"), text)
    text = text.replace("{{", "{").replace("}}", "}")
    return re.sub(r"%\(\w+\)s|%s", "$1", text).replace("%%", "%")


def parsed(text: str) -> Any:
    """The tree of a statement, or of a part of one."""
    pglast = pytest.importorskip("pglast", reason="the parser of Postgres is not installed; see the group `dev`")
    for before, after in (("", ""), ("SELECT 1 WHERE true ", ""), ("SELECT ", ""), ("", " SELECT 1")):
        try:
            return pglast.parse_sql(f"{before}{filled(text)}{after}")
        except pglast.parser.ParseError as error:
            problem = error
    raise AssertionError(f"{problem}: {text}")


def nodes(tree: Any) -> Iterator[Any]:
    """A tree's nodes, in their order."""
    pglast = pytest.importorskip("pglast")
    if isinstance(tree, tuple):
        for each in tree:
            yield from nodes(each)
    elif isinstance(tree, pglast.ast.Node):
        yield tree
        for name in tree:
            yield from nodes(getattr(tree, name))


def texts(names: Any) -> list[str]:
    return [each.sval for each in names or ()]


def unqualified(tree: Any) -> list[str]:
    """What of Postgres's own the tree names without its schema."""
    found = []
    spread = {id(call) for node in nodes(tree) for call in several_unnested(node)}
    for node in nodes(tree):
        kind = type(node).__name__
        if kind == "CaseExpr" and node.arg is not None:
            found.append("CASE with a value")
        if kind == "A_Expr" and len(node.name) == 1:
            found.append(f"{node.kind.name} {texts(node.name)}")
        elif kind == "SubLink" and node.subLinkType.name in ("ANY_SUBLINK", "ALL_SUBLINK"):
            found += [] if len(node.operName or ()) == 2 else [f"IN or {texts(node.operName)} with a subquery"]
        elif kind == "FuncCall" and len(node.funcname) == 1 and id(node) not in spread:
            found.append(f"{texts(node.funcname)}(…)")
        elif kind == "TypeName" and node.names and len(node.names) == 1 and texts(node.names) != ["record"]:
            found.append(f"the type {texts(node.names)}")
        elif kind == "RangeVar" and not node.schemaname and node.relname.startswith("pg_"):
            found.append(node.relname)
    return found


def several_unnested(node: Any) -> Iterator[Any]:
    """The call in `FROM unnest(one, another)`: a form of the grammar's, which always means Postgres's own."""
    if type(node).__name__ == "RangeFunction":
        for functions in node.functions:
            call = functions[0]
            if type(call).__name__ == "FuncCall" and texts(call.funcname) == ["unnest"] and len(call.args) > 1:
                yield call


def meaning(tree: Any) -> list[Any]:
    """A tree without places, and without the schemas of what is Postgres's own."""
    pglast = pytest.importorskip("pglast")

    def plain(value: Any, name: str) -> Any:
        if isinstance(value, tuple):
            names = [plain(each, "") for each in value]
            own = name in ("name", "funcname", "names", "operName") and len(names) == 2 and "pg_catalog" in names[0]
            return names[1:] if own else names
        if isinstance(value, pglast.ast.String):
            return value.sval
        if isinstance(value, pglast.ast.Node):
            skipped = {"location", "stmt_len", "stmt_location", "list_start", "list_end"}
            attributes = [(each, plain(getattr(value, each), each)) for each in value if each not in skipped]
            return [type(value).__name__, [each for each in attributes if each[0] != "schemaname"]]
        return None if name.endswith(("location", "_start", "_end")) else value

    return [plain(tree, "")]


@pytest.mark.parametrize("name", statements())
def test_a_statement_means_the_same_with_its_names_in_full(name: str) -> None:
    plain, full = statements()[name], qualified(statements()[name])
    assert unqualified(parsed(full)) == []
    assert meaning(parsed(plain)) == meaning(parsed(full))


def functions() -> dict[str, Any]:
    """The last definition of each function that migrations and statements make."""
    found = {}
    for text in [*migrations().values(), *(text for text in statements().values() if "FUNCTION" in text)]:
        if "CREATE OR REPLACE FUNCTION" in text:
            for raw in parsed(text):
                if type(raw.stmt).__name__ == "CreateFunctionStmt":
                    types = [texts(each.argType.names)[-1] for each in raw.stmt.parameters or ()]
                    found[f"{texts(raw.stmt.funcname)[-1]}({', '.join(types)})"] = raw.stmt
    return found


def expressions(node: Any) -> Iterator[str]:
    """What a body in PL/pgSQL runs."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "PLpgSQL_expr":
                yield re.sub(r"^\s*\w+\s*:=", "", value["query"])
            else:
                yield from expressions(value)
    elif isinstance(node, list):
        for each in node:
            yield from expressions(each)


def test_the_bodies_of_our_functions_name_everything_in_full() -> None:
    pglast = pytest.importorskip("pglast", reason="the parser of Postgres is not installed; see the group `dev`")
    found = functions()
    assert len(found) >= 8
    for name, function in found.items():
        options = {each.defname: each.arg for each in function.options}
        if any(each.defname == "set" and each.arg.name == "search_path" for each in function.options):
            continue  # It brings its own, of Postgres's names alone.
        [body] = [each.sval for each in options["as"]]
        if options["language"].sval == "sql":
            assert unqualified(pglast.parse_sql(body)) == [], name
            continue
        [tree] = pglast.parse_plpgsql(
            f"CREATE FUNCTION f() RETURNS {'trigger' if 'wake_up' in name else 'text'} LANGUAGE plpgsql AS $f${body}$f$"
        )
        asked = list(expressions(tree))
        assert asked, name
        for each in asked:
            assert unqualified(parsed(each)) == [], f"{name}: {each}"


@pytest.mark.parametrize(
    ("plain", "full"),
    [
        ("SELECT lower(x) = 'lower(b) = 1' -- f(x) = 1", "SELECT P.lower(x) =P 'lower(b) = 1' -- f(x) = 1"),
        ("UPDATE t SET a = b = c, d[1] = 2 WHERE e = 3", "UPDATE t SET a = b =P c, d[1] = 2 WHERE e =P 3"),
        ("SELECT *, t.*, count(*), 2 * 3 FROM pg_class", "SELECT *, t.*, P.count(*), 2 *P 3 FROM P.pg_class"),
        ("SELECT %(a)s::text[], %s::int, 5 %% 2", "SELECT %(a)s::P.text[], %s::int, 5 %%P 2"),
        ("x = ANY (SELECT f(y) AS z (a) FROM {t})", "x =P ANY (SELECT P.f(y) AS z (a) FROM {t})"),
        ("CREATE TABLE {t} WITH (a = b) AS SELECT c->>'d'", "CREATE TABLE {t} WITH (a = b) AS SELECT c ->>P'd'"),
        ("FROM unnest(a, b) JOIN unnest(c[1, 2])", "FROM unnest(a, b) JOIN P.unnest(c[1, 2])"),
        ("AS $$ SELECT f(1) = 2 $$", "AS $$ SELECT f(1) = 2 $$"),
    ],
)
def test_names_in_full(plain: str, full: str) -> None:
    full = re.sub(r"([-=*>%]+)P", r"OPERATOR(pg_catalog.\1)", full).replace("P.", "pg_catalog.")
    assert qualified(plain) == full


def test_what_is_no_sql_of_ours_is_refused() -> None:
    with pytest.raises(ValueError, match="not SQL as this project writes it: '`a`'"):
        qualified("SELECT `a`")


@pytest.mark.parametrize("condition", ["x IN (1)", "x BETWEEN 1 AND 2", "x LIKE 'a'", "x IS NOT DISTINCT FROM y"])
def test_an_operator_that_takes_no_schema_is_refused(condition: str) -> None:
    with pytest.raises(ValueError, match="names an operator, and takes no schema"):
        qualified(f"SELECT {condition}")


@pytest.mark.parametrize(
    "kind", ["CASE x WHEN 1 THEN 2 END", "CASE lower(x) WHEN 'a' THEN 2 END", "CASE (x) WHEN 1 THEN 2 END"]
)
def test_a_case_that_compares_a_value_is_refused(kind: str) -> None:
    """It would look its operator up on the search_path."""
    with pytest.raises(ValueError, match="CASE with a value names the operator ="):
        qualified(f"SELECT {kind}")


def test_a_text_that_depends_on_a_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="depends on the session's standard_conforming_strings"):
        qualified("SELECT split_part(x, '\\000', 2)")


def test_the_bodies_of_our_functions_depend_on_no_setting_of_texts() -> None:
    for name, function in functions().items():
        [body] = [each.arg for each in function.options if each.defname == "as"]
        assert not any("\\" in part.sval for part in body), name
