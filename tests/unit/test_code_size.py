"""A file is one idea, and a function can be read in one sitting."""

import ast
from pathlib import Path

import penstock

MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 70
SOURCES = sorted(Path(penstock.__file__).parent.rglob("*.py"))


def test_no_file_is_longer_than_500_lines():
    lengths = {path: path.read_text().count("\n") for path in SOURCES}
    assert lengths
    assert {p: n for p, n in lengths.items() if n > MOST_LINES_OF_A_FILE} == {}


def test_no_function_is_longer_than_70_lines():
    lengths = {
        (path, node.name, node.lineno): (node.end_lineno or 0) - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert lengths
    assert {f: n for f, n in lengths.items() if n > MOST_LINES_OF_A_FUNCTION} == {}
