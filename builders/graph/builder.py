"""A small ONNX graph builder: names by scope, constants written once, subgraphs for `If`.

Node names spell the place in the model (`target/layers.3/mlp/down_proj`), so that a compiler's
complaint about a node names the checkpoint layer it came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["BOOL", "FLOAT", "INT64", "OPSET", "Branch", "GraphBuilder"]

OPSET = 24
IR_VERSION = 11
FLOAT = TensorProto.FLOAT
INT64 = TensorProto.INT64
BOOL = TensorProto.BOOL

Shape = Sequence[int | str]


class _Shared:
    """What a graph and its subgraphs have in common: initializers, names, the scope."""

    def __init__(self) -> None:
        self.initializers: list[TensorProto] = []
        self.constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self.used: dict[str, int] = {}
        self.scope: list[str] = []

    def unique(self, stem: str) -> str:
        name = "/".join([*self.scope, stem])
        count = self.used.get(name, 0)
        self.used[name] = count + 1
        return name if count == 0 else f"{name}.{count}"


class GraphBuilder:
    """Collects nodes of one graph. `op` returns tensor names; nothing is computed."""

    def __init__(self, shared: _Shared | None = None) -> None:
        self._shared = shared or _Shared()
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of everything emitted inside."""
        self._shared.scope.append(name)
        try:
            yield
        finally:
            self._shared.scope.pop()

    def op(self, op_type: str, *inputs: str, name: str = "", domain: str = "", **attributes: Any) -> str:
        """Emit a node with one output; returns the output's name."""
        return self.multi(op_type, *inputs, outputs=1, name=name, domain=domain, **attributes)[0]

    def multi(
        self, op_type: str, *inputs: str, outputs: int, name: str = "", domain: str = "", **attributes: Any
    ) -> list[str]:
        """Emit a node with several outputs; returns their names."""
        node = self._shared.unique(name or op_type)
        results = [node if outputs == 1 else f"{node}:{i}" for i in range(outputs)]
        self._nodes.append(
            helper.make_node(op_type, list(inputs), results, name=node, domain=domain, **attributes)
        )
        return results

    def const(self, value: npt.ArrayLike, dtype: npt.DTypeLike = np.int64) -> str:
        """A small constant, stored once however often it is asked for."""
        array = np.asarray(value, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._shared.constants:
            name = f"const.{len(self._shared.constants)}"
            self._shared.initializers.append(numpy_helper.from_array(array, name))
            self._shared.constants[key] = name
        return self._shared.constants[key]

    def initializer(self, tensor: TensorProto) -> str:
        """Register an initializer (external data as a rule); returns its name."""
        self._shared.initializers.append(tensor)
        return str(tensor.name)

    def input(self, name: str, elem_type: int, shape: Shape) -> str:
        """Declare a graph input."""
        self._inputs.append(helper.make_tensor_value_info(name, elem_type, list(shape)))
        return name

    def output(self, name: str, value: str, elem_type: int, shape: Shape) -> str:
        """Declare a node's result as a graph output under `name`; returns that name.

        To be called right behind the node: it is renamed, since an Identity would copy the tensor.
        """
        node = self._nodes[-1]
        place = list(node.output).index(value)
        node.output[place] = name
        self._outputs.append(helper.make_tensor_value_info(name, elem_type, list(shape)))
        return name

    def branch(self, condition: str, then: Branch, otherwise: Branch, name: str) -> list[str]:
        """Emit `If`; both branches carry the same number and types of values."""
        graphs = {}
        for side, branch in (("then_branch", then), ("else_branch", otherwise)):
            outputs = [helper.make_tensor_value_info(v, t, None) for v, t in branch.values]
            graphs[side] = helper.make_graph(branch.builder._nodes, side, [], outputs)
        return self.multi("If", condition, outputs=len(then.values), name=name, **graphs)

    def subgraph(self) -> GraphBuilder:
        """A builder for a branch: sees this graph's tensors, shares its names and constants."""
        return GraphBuilder(self._shared)

    def model(
        self,
        name: str,
        functions: Sequence[onnx.FunctionProto] = (),
        domains: Mapping[str, int] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> onnx.ModelProto:
        """The finished model. `domains` lists the non-default operator sets that nodes use."""
        graph = helper.make_graph(
            self._nodes, name, self._inputs, self._outputs, initializer=self._shared.initializers
        )
        opsets = [helper.make_opsetid("", OPSET)]
        opsets += [helper.make_opsetid(domain, version) for domain, version in (domains or {}).items()]
        model = helper.make_model(
            graph, opset_imports=opsets, functions=list(functions), ir_version=IR_VERSION
        )
        model.producer_name = "trtspec"
        helper.set_model_props(model, dict(metadata or {}))
        return model


class Branch:
    """One side of an `If`: its builder and the values it hands out, each with its element type."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.builder = builder
        self.values: list[tuple[str, int]] = []

    def give(self, value: str, elem_type: int) -> None:
        """Hand out `value`. An outer tensor passes through an Identity, as ONNX demands."""
        self.values.append((self.builder.op("Identity", value), elem_type))
