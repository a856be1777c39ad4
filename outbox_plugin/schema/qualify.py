"""Qualifies every function, operator and type in our SQL with the schema pg_catalog.

A name without a schema means whatever the session's search_path finds. Somebody who may create objects in a schema of
that path could add a function or an operator whose argument types match better than those of Postgres's own, such as
`lower(varchar)`, and it would run with the rights of whoever runs our statements. Setting the search_path would not
help: a pooler in transaction mode loses it, and some statements run on connections of the user.

So the statements are written plainly, and are qualified when they are loaded. All operators then have the same
precedence, that of OPERATOR(): a statement that depends on another one uses parentheses. A test parses each statement
in both forms and compares them.
"""

from __future__ import annotations

import re
from itertools import islice
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
# Words that may precede a parenthesis without being functions; then the types that Postgres's grammar knows.
_KEYWORDS = frozenset(
    {"ALL", "AND", "ANY", "ARRAY", "AS", "BY", "CASE", "COALESCE", "CONFLICT", "DISTINCT", "ELSE", "EXISTS", "EXTRACT"}
    | {"FILTER", "FOR", "FROM", "GREATEST", "INTERVAL", "IS", "JOIN", "KEY", "LATERAL", "LEAST", "LIMIT", "NOT"}
    | {"ON", "OR", "OVER", "RETURNING", "ROW", "SELECT", "SET", "THEN", "TO", "UNION", "UNIQUE", "USING", "VALUES"}
    | {"WHEN", "WHERE", "WITH"}
)
_GRAMMARS_TYPES = frozenset({"BIGINT", "BOOLEAN", "INT", "INTEGER", "INTERVAL", "SMALLINT", "TIMESTAMP", "VARCHAR"})
_NO_FUNCTIONS = _KEYWORDS | _GRAMMARS_TYPES
_WITHOUT_A_SCHEMA = frozenset({"BETWEEN", "ILIKE", "IN", "LIKE", "NATURAL", "NULLIF", "SIMILAR"})
_END_OF_ASSIGNMENTS = frozenset({"WHERE", "FROM", "RETURNING"})
_OPENING, _CLOSING = frozenset({"(", "["}), frozenset({")", "]"})
_BEFORE_A_STAR = frozenset({"SELECT", "RETURNING", "(", ".", ","})  # After these, a star does not multiply.


class _Token(NamedTuple):
    """A token that means something.

    Attributes:
        space: the space and the comments before it.
        kind: the name of its group in `_TOKEN`.
        text: as it is written.
        word: the same in capitals, to compare it with keywords.
    """

    space: str
    kind: str
    text: str
    word: str


_NOTHING = _Token("", "mark", "", "")


def qualified(text: str) -> str:
    """`text`, a statement or a part of one, with every function, operator and type of Postgres qualified.

    Text in dollar quotes, such as a function's body, is not changed.

    Raises:
        ValueError: the text has a character that none of our statements has, an operator that cannot be qualified, or a
            backslash in a literal, whose meaning depends on the session's `standard_conforming_strings`.
    """
    tokens = _tokens(text)
    assignments = _Assignments()
    before, full = _NOTHING, []
    for place, token in enumerate(tokens):
        full.append(token.space)
        if token.word in _WITHOUT_A_SCHEMA or (token.word == "DISTINCT" and before.word in ("IS", "NOT")):
            raise ValueError(f"{token.text} names an operator, and takes no schema: write = ANY (…), >=, or the like")
        if before.word == "CASE" and token.word not in ("WHEN", ""):
            raise ValueError("CASE with a value names the operator =, and takes no schema: write CASE WHEN … = …")
        if token.kind == "literal" and token.text.startswith("'") and "\\" in token.text:
            raise ValueError(f"a backslash in {token.text} depends on the session's standard_conforming_strings")
        assigns = assignments.take(token, before)
        if token.kind == "operator" and not assigns and not (token.text == "*" and before.word in _BEFORE_A_STAR):
            apart = " " if before.kind == "word" and not token.space else ""
            full.append(f"{apart}OPERATOR(pg_catalog.{token.text})")
        elif token.kind == "word" and before.text != "." and _is_of_postgres(token, before, tokens, place + 1):
            full.append(f"pg_catalog.{token.text}")
        else:
            full.append(token.text)
        before = token
    return "".join(full)


def _tokens(text: str) -> list[_Token]:
    """The tokens of a text. The last one may be empty, with the space at the end."""
    found, place, space = [], 0, []
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"not SQL as this project writes it: {text[place : place + 20]!r}")
        kind, part, place = match.lastgroup or "", match[0], match.end()
        if kind == "space":
            space.append(part)
        else:
            found.append(_Token("".join(space), kind, part, part.upper()))
            space.clear()
    return [*found, _NOTHING._replace(space="".join(space))]


class _Assignments:
    """Recognizes the equals signs that assign: the first after each comma of a SET, and those of a table's options."""

    def __init__(self) -> None:
        self._depth = 0  # Of parentheses.
        self._at: int | None = None  # The depth at which assignments stand now.
        self._expected = False

    def take(self, token: _Token, before: _Token) -> bool:
        """Process the next token. Returns whether it assigns."""
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


def _is_of_postgres(token: _Token, before: _Token, tokens: list[_Token], next_place: int) -> bool:
    """Whether a word names a type, a function or a catalog, rather than being a keyword or a name of ours.

    Args:
        token: the word.
        before: the token before it.
        tokens: of the whole text.
        next_place: the place in `tokens` of the one after it.
    """
    following = tokens[next_place].text
    if before.text == "::":
        return token.word not in _GRAMMARS_TYPES
    if following == "(":
        if token.word == "UNNEST" and _arguments(tokens, next_place) > 1:
            return False  # A construct of the grammar, which takes no schema.
        return token.word not in _NO_FUNCTIONS and before.word != "AS"
    return before.word in ("FROM", "JOIN") and token.word.startswith("PG_") and following != "."


def _arguments(tokens: list[_Token], place: int) -> int:
    """How many arguments are in the parentheses that open at a place."""
    depth, found = 0, 1
    for token in islice(tokens, place, None):
        depth += (token.text in _OPENING) - (token.text in _CLOSING)
        if depth == 0:
            break
        found += depth == 1 and token.text == ","
    return found
