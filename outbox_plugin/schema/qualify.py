"""Names every function, operator and type of our SQL in full, as one of Postgres's own.

A name without a schema means whatever the session's search_path finds. Who may create in a schema of that path could
add a function or an operator whose argument types fit better than those of Postgres's own, `lower(varchar)` say, and it
would run as whoever runs our statements. A search_path of our own would not do: a pooler in transaction mode keeps
none, and some statements run on connections of the user's.

So the statements are written plainly, and are qualified when they are loaded. All operators have one precedence then,
as Postgres gives OPERATOR() one: where another one matters, a statement says it by parentheses. A test parses each
statement in both forms and compares them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<space>\s+|--[^\n]*)
    | (?P<literal>'(?:[^']|'')*' | "[^"]*" | \$(\w*)\$.*?\$\3\$ | %\(\w+\)s | %s | \{\w+\} | \d[\d.]*)
    | (?P<word>[A-Za-z_]\w*)
    | (?P<mark>:: | := | [(),.;\[\]])
    | (?P<operator>(?:%% | [-+*/<>=~!@\#&|^?])+)
    """,
    re.VERBOSE | re.DOTALL,
)
# What a parenthesis may follow without being called, and the types that the grammar itself knows.
_KEYWORDS = frozenset(
    {"ALL", "AND", "ANY", "ARRAY", "AS", "BY", "CASE", "COALESCE", "CONFLICT", "DISTINCT", "ELSE", "EXISTS", "EXTRACT"}
    | {"FILTER", "FOR", "FROM", "GREATEST", "INTERVAL", "IS", "KEY", "LATERAL", "LEAST", "LIMIT", "NOT"}
    | {"ON", "OR", "OVER", "RETURNING", "ROW", "SELECT", "SET", "THEN", "TO", "UNION", "UNIQUE", "USING", "VALUES"}
    | {"WHEN", "WHERE", "WITH"}
)
_GRAMMARS_TYPES = frozenset({"BIGINT", "BOOLEAN", "INT", "INTEGER", "INTERVAL", "SMALLINT", "TIMESTAMP", "VARCHAR"})
_WITHOUT_A_SCHEMA = frozenset({"BETWEEN", "ILIKE", "IN", "LIKE", "NATURAL", "NULLIF", "SIMILAR"})
_END_OF_ASSIGNMENTS = frozenset({"WHERE", "FROM", "RETURNING"})
_BEFORE_A_STAR = frozenset({"SELECT", "RETURNING", "(", ".", ","})  # A star that multiplies nothing.


class _Token(NamedTuple):
    kind: str
    text: str

    @property
    def word(self) -> str:
        """In capitals, as keywords are compared."""
        return self.text.upper()


_NOTHING = _Token("mark", "")


def qualified(text: str) -> str:
    """`text`, one statement or a part of one, with every function, operator and type of Postgres's named in full.

    What stands between dollar quotes, such as a function's body, is left as it is.

    Raises:
        ValueError: a character that none of our statements has, an operator that cannot be named in full, or a
            backslash in a text, which means what the session's `standard_conforming_strings` says.
    """
    tokens = _tokens(text)
    assignments = _Assignments()
    before, full = _NOTHING, []
    for place, token in enumerate(tokens):
        if token.kind == "space":
            full.append(token.text)
            continue
        if token.word in _WITHOUT_A_SCHEMA or (token.word == "DISTINCT" and before.word in ("IS", "NOT")):
            raise ValueError(f"{token.text} names an operator, and takes no schema: write = ANY (…), >=, or the like")
        if before.word == "CASE" and token.word != "WHEN":
            raise ValueError("CASE with a value names the operator =, and takes no schema: write CASE WHEN … = …")
        if token.kind == "literal" and token.text.startswith("'") and "\\" in token.text:
            raise ValueError(f"a backslash in {token.text} depends on the session's standard_conforming_strings")
        assigns = assignments.take(token, before)
        if token.kind == "operator" and not assigns and not (token.text == "*" and before.word in _BEFORE_A_STAR):
            space = " " if place and tokens[place - 1].kind == "word" else ""
            full.append(f"{space}OPERATOR(pg_catalog.{token.text})")
        elif token.kind == "word" and before.text != "." and _is_of_postgres(token, before, tokens[place + 1 :]):
            full.append(f"pg_catalog.{token.text}")
        else:
            full.append(token.text)
        before = token
    return "".join(full)


def _tokens(text: str) -> list[_Token]:
    found, place = [], 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"not SQL as this project writes it: {text[place : place + 20]!r}")
        kind = next(name for name, given in match.groupdict().items() if given is not None)
        found.append(_Token(kind, match[0]))
        place = match.end()
    return found


class _Assignments:
    """Knows which equals signs assign: the first after each comma of a SET, and those of a table's options."""

    def __init__(self) -> None:
        self._depth = 0  # Of parentheses.
        self._at: int | None = None  # The depth at which assignments stand now.
        self._expected = False

    def take(self, token: _Token, before: _Token) -> bool:
        """Go on to `token`; whether it assigns."""
        self._depth += (token.text == "(") - (token.text == ")")
        opens_options = token.text == "(" and before.word in ("SET", "WITH")
        if token.word == "SET" or opens_options:
            self._at, self._expected = self._depth, True
        elif self._at is not None and (self._depth < self._at or self._ends(token)):
            self._at = None
        elif token.text == "," and self._depth == self._at:
            self._expected = True
        elif token.text == "=" and self._depth == self._at and self._expected:
            self._expected = False
            return True
        return False

    def _ends(self, token: _Token) -> bool:
        return self._depth == self._at and token.word in _END_OF_ASSIGNMENTS


def _is_of_postgres(token: _Token, before: _Token, after: list[_Token]) -> bool:
    """Whether a word names a type, a function or a catalog, rather than being a keyword or a name of ours."""
    following = [each for each in after if each.kind != "space"]
    following_text = following[0].text if following else ""
    if before.text == "::":
        return token.word not in _GRAMMARS_TYPES
    if following_text == "(":
        if token.word == "UNNEST" and _arguments(following) > 1:
            return False  # A form of the grammar's, which it knows by this one word alone.
        return token.word not in _KEYWORDS | _GRAMMARS_TYPES and before.word != "AS"
    return before.word in ("FROM", "JOIN") and token.word.startswith("PG_") and following_text != "."


def _arguments(tokens: list[_Token]) -> int:
    """How many stand between the parentheses that `tokens` begin with."""
    depth, found = 0, 1
    for token in tokens:
        depth += (token.text in "([") - (token.text in ")]")
        if depth == 0:
            break
        found += depth == 1 and token.text == ","
    return found
