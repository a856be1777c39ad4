"""Docstrings say what the reader of a call must know: with more than two parameters, `Args:` names each of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.documents import CHECKOUT

PACKAGE = CHECKOUT / "outbox_plugin"
MAX_WITHOUT_ARGS = 2
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Documented(NamedTuple):
    """A public function or method, and where its parameters may be documented: a constructor's class is one place."""

    name: str
    function: Function
    docstring: str
    is_method: bool

    @property
    def parameters(self) -> list[str]:
        """Their names, without `self` or `cls`."""
        args = self.function.args
        named = [*args.posonlyargs, *args.args]
        if self.is_method and "staticmethod" not in decorators(self.function):
            named = named[1:]
        more = [each for each in (args.vararg, args.kwarg) if each is not None]
        return [each.arg for each in (*named, *args.kwonlyargs, *more)]

    @property
    def undocumented(self) -> list[str]:
        """The parameters that the section `Args:` does not name; none if the function needs no such section."""
        if len(self.parameters) <= MAX_WITHOUT_ARGS or decorators(self.function) & {"command", "group", "overload"}:
            return []  # A command's parameters are documented by the help of its options.
        _, _, section = self.docstring.partition("Args:\n")
        return [name for name in self.parameters if not re.search(rf"^ +\*{{0,2}}{name}: \S", section, re.MULTILINE)]


def decorators(function: Function) -> set[str]:
    """The last name of each decorator: `command` of `@bench.command("drain")`."""
    called = [each.func if isinstance(each, ast.Call) else each for each in function.decorator_list]
    return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in called}


def public(body: list[ast.stmt], owner: ast.ClassDef | None = None) -> Iterator[Documented]:
    """The public functions of a module, or of a class."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node.body, node)
        elif isinstance(node, Function) and (node.name == "__init__" or not node.name.startswith("_")):
            docstring = ast.get_docstring(node) or ""
            if owner is not None and node.name == "__init__":
                docstring = f"{docstring}\n{ast.get_docstring(owner) or ''}"
            name = node.name if owner is None else f"{owner.name}.{node.name}"
            yield Documented(name, node, docstring, owner is not None)


def test_every_function_with_more_than_two_parameters_documents_each() -> None:
    undocumented = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        functions = public(ast.parse(path.read_text()).body)
        undocumented += [f"{module}: {each.name}: {each.undocumented}" for each in functions if each.undocumented]
    assert not undocumented, "\n".join(undocumented)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(a, b, c): ...", ["a", "b", "c"]),
        ('def f(a, b, c):\n    """F.\n\n    Args:\n        a: one.\n        c: three.\n    """', ["b"]),
        ("def f(a, b): ...", []),
        ("class C:\n    def f(self, a, b): ...", []),
        ("class C:\n    def f(self, a, *, b, c): ...", ["a", "b", "c"]),
        ("class C:\n    @staticmethod\n    def f(a, b, c): ...", ["a", "b", "c"]),
        ('class C:\n    """C.\n\n    Args:\n        a: one.\n        b: two.\n        c: three.\n    """\n'
         "    def __init__(self, a, b, c): ...", []),
        ("async def f(a, b, **more): ...", ["a", "b", "more"]),
        ("@bench.command()\ndef f(a, b, c): ...", []),
        ("def _f(a, b, c): ...", None),
    ],
)  # fmt: skip
def test_what_is_undocumented(code: str, expected: list[str] | None) -> None:
    found = [each.undocumented for each in public(ast.parse(code).body)]
    assert found == ([] if expected is None else [expected])


def test_every_option_of_a_command_has_a_help() -> None:
    silent = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "click.option"
        if not any(keyword.arg == "help" for keyword in node.keywords)
    ]
    assert not silent
