"""Who may import whom: a board has neither torch nor the cloud's code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.models import ROOT

FORBIDDEN = {
    "protocol": {"link", "edge", "cloud", "tools", "torch", "transformers", "paho", "onnxruntime"},
    "link": {"edge", "cloud", "tools", "torch", "transformers", "onnxruntime"},
    "edge": {"cloud", "tools", "torch", "transformers"},
    "cloud": {"edge", "tools", "onnxruntime"},
    "native": {"link", "edge", "cloud", "tools", "torch", "transformers", "onnxruntime"},
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_rooms_import_only_what_they_may(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {str(path.relative_to(ROOT)): bad for path in files if (bad := imports(path) & FORBIDDEN[package])}
    assert not wrong
