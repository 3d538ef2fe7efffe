"""The domain of the engine's ONNX functions, and how a function's text becomes one."""

from __future__ import annotations

from typing import Any, Protocol

import onnx
import onnx.parser

__all__ = ["DOMAIN", "OPSET", "VERSION", "Graph", "parse"]

DOMAIN = "trtspec"
VERSION = 1  # of the functions' definition
OPSET = 24


class Graph(Protocol):
    """What emits the nodes that call these functions: a graph builder."""

    def multi(
        self, op_type: str, *inputs: str, outputs: int, name: str = "", domain: str = "", **attributes: Any
    ) -> list[str]:
        """Emit a node; returns its outputs' names."""
        ...


def parse(body: str) -> onnx.FunctionProto:
    """A function of the domain, from its text."""
    header = f'<domain: "{DOMAIN}", opset_import: ["": {OPSET}, "{DOMAIN}": {VERSION}]>'
    return onnx.parser.parse_function(header + body)
