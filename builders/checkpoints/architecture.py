"""Proves a decoder's architecture from tensor names and shapes; config.json only fills the gaps.

Where the headers decide and config.json says otherwise, the headers win and the contradiction is
reported as a warning. Where they cannot decide, or tensors contradict each other, reading stops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from builders.checkpoints.claims import Claims, rope, sliding
from builders.checkpoints.types import DecoderConfig, TensorRef
from engines.errors import CheckpointError

__all__ = [
    "ArchitectureError",
    "ContradictionError",
    "MissingTensorError",
    "QuantizedError",
    "UnknownTensorError",
    "check_tensors",
    "is_buffer",
    "prove",
    "prove_layer",
    "recognise",
]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_EMBED, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d{0,4})\.(.+)")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_O = "self_attn.o_proj"
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# Found in file names and tensor names: what it is, for a message that helps. The first match counts.
_FOREIGN: tuple[tuple[str, str], ...] = (
    (r"(^|\.)lora_[AB](\.|$)", "a LoRA adapter"),
    (r"(^|\.)(vision_tower|vision_model|visual|vision_encoder|multi_modal_projector)\.", "a vision tower"),
    (r"\.experts\.|\.block_sparse_moe\.|\.mlp\.gate\.weight$", "a mixture of experts"),
    (r"^(medusa_heads?\.)?\d+\.\d+\.(linear\.)?(weight|bias)$", "Medusa heads"),
    (r"^(d2t|t2d)$|^midlayer\.", "an EAGLE-3 head"),
    (r"^fc\.weight$", "an EAGLE head"),
    (r"^transformer\.(h|wte)\b", "a GPT-2-type model"),
    (r"^(encoder|decoder)\.", "an encoder or encoder-decoder"),
)
_QUANTIZED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|weight_packed|weight_scale(_inv|_2)?|input_scale|k_scale|v_scale"
    r"|(weight\.)?(absmax|quant_map|quant_state\..+|nested_absmax|SCB))$"
)
_HEADS_REMEDY = "As a drafter it needs the target that it was trained on; give that target here."


class ArchitectureError(CheckpointError):
    """The checkpoint holds something else than a supported decoder."""

    rule = "checkpoint.unsupported-architecture"
    remedy_text = "Use a decoder-only Llama, Mistral, Qwen2 or Qwen3 checkpoint."


class QuantizedError(CheckpointError):
    """The checkpoint's weights are quantized."""

    rule = "checkpoint.quantized"
    remedy_text = (
        "Not yet supported: quantized checkpoints. Use the original in float32, float16 or bfloat16."
    )


class MissingTensorError(CheckpointError):
    """A tensor that the architecture needs is not there."""

    rule = "checkpoint.missing-tensor"
    remedy_text = "Fetch the checkpoint again: a shard may be missing or of another revision."


class UnknownTensorError(CheckpointError):
    """A tensor that the architecture does not have, so that leaving it out would change the model."""

    rule = "checkpoint.unknown-tensor"
    remedy_text = "The model has a part that is not supported: use a checkpoint without it."


class ContradictionError(CheckpointError):
    """Tensors contradict each other, or config.json in a way that they cannot settle."""

    rule = "checkpoint.contradiction"
    remedy_text = "Fetch config.json and the weights again, from the same revision."


def is_buffer(name: str) -> bool:
    """Whether a tensor is a table that old checkpoints saved and that is computed anyway."""
    return name.endswith(".rotary_emb.inv_freq")


def recognise(tensors: Mapping[str, TensorRef], config: Mapping[str, Any], place: str) -> None:
    """Refuses what is known and not a plain decoder, by its name.

    Raises:
        QuantizedError, ArchitectureError.
    """
    for name, tensor in tensors.items():
        if _QUANTIZED.search(name) or (name.endswith("_proj.weight") and tensor.dtype not in _FLOATS):
            raise QuantizedError(f"{tensor.dtype} {list(tensor.shape)}", place=f"{place}:{name}")
    if config.get("quantization_config"):
        raise QuantizedError("quantization_config", place=f"{place}:config.json")
    for pattern, what in _FOREIGN:
        found = next((name for name in tensors if re.search(pattern, name)), None)
        if found is not None:
            heads = what.startswith(("Medusa", "an EAGLE"))
            raise ArchitectureError(
                f"{what}, by the tensor {found}",
                place=place,
                allowed=f"a decoder of the families {', '.join(FAMILIES)}",
                remedy=_HEADS_REMEDY if heads else None,
            )


def prove(
    tensors: Mapping[str, TensorRef], config: Claims, place: str
) -> tuple[DecoderConfig, tuple[str, ...]]:
    """The architecture, and the claims of config.json that the tensors contradict.

    Args:
        tensors: of the checkpoint, buffers left out.
        config: of config.json.
        place: the folder, for messages.

    Raises:
        ArchitectureError, MissingTensorError, UnknownTensorError, ContradictionError, ConfigError,
        UnsupportedRopeError.
    """
    return _Proof(tensors, config, place).result()


def prove_layer(
    tensors: Mapping[str, TensorRef],
    config: Claims,
    place: str,
    *,
    hidden: int,
    attention_width: int,
    norms: tuple[str, ...],
    others: Mapping[str, tuple[int, ...]],
    spell: Callable[[str], str],
) -> tuple[DecoderConfig, tuple[str, ...]]:
    """As `prove`, of one decoder layer that stands in a drafter's head instead of a whole model.

    The family is what the tensors say: the layer of a Qwen3 where queries and keys have norms, else of a
    Llama, with or without biases. `vocab_size` is left at 0 for the caller, who knows it.

    Args:
        tensors: by canonical name (`model.layers.0.…`), and nothing but the layer's and `others`.
        hidden: width of the residual stream.
        attention_width: width of what q, k and v read.
        norms: those of the layer's norms that this head has.
        others: shapes of the tensors outside the layer, by canonical name.
        spell: a canonical name as the checkpoint spells it, for messages.
    """
    proof = _Proof(tensors, config, place, spell)
    layer = proof.layer(hidden, attention_width)
    check_tensors(tensors, {**others, **layer.tensors(0, norms)}, place, spell)
    proof.check_activation()
    proof.claim("hidden_size", hidden)
    proof.claim("num_hidden_layers", 1)
    proof.claim_layer(layer)
    proof.claim("attention_bias", layer.qkv_bias)
    proof.claim("mlp_bias", layer.mlp_bias)
    proved = DecoderConfig(
        family="qwen3" if layer.qk_norm else "llama",
        vocab_size=0,
        hidden_size=hidden,
        intermediate_size=layer.intermediate,
        num_layers=1,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope(config),
        max_position=config.integer("max_position_embeddings", 2048),
        tie_embeddings=False,
        qkv_bias=layer.qkv_bias,
        o_bias=layer.o_bias,
        mlp_bias=layer.mlp_bias,
        qk_norm=layer.qk_norm,
        dtype=proof.dtype([f"model.layers.0.{part}.weight" for part in layer.linear]),
    )
    return proved, tuple(proof.warnings)


def check_tensors(
    tensors: Mapping[str, TensorRef],
    expected: Mapping[str, tuple[int, ...]],
    place: str,
    spell: Callable[[str], str] = str,
) -> None:
    """That these tensors are there, of these shapes, in a float dtype, and no others.

    Raises:
        MissingTensorError, ContradictionError, QuantizedError, UnknownTensorError.
    """
    for name, shape in expected.items():
        tensor = tensors.get(name)
        at = f"{place}:{spell(name)}"
        if tensor is None:
            raise MissingTensorError("it is not there", place=at, allowed=f"{list(shape)}")
        if tensor.shape != shape:
            raise ContradictionError(f"shape {list(tensor.shape)}", place=at, allowed=f"{list(shape)}")
        if tensor.dtype not in _FLOATS:
            raise QuantizedError(f"dtype {tensor.dtype}", place=at, allowed=", ".join(_FLOATS))
    strange = next((name for name in tensors if name not in expected), None)
    if strange is not None:
        raise UnknownTensorError(
            "a tensor that the family does not have, or that layer 0 does not",
            place=f"{place}:{spell(strange)}",
        )


@dataclass(frozen=True)
class _Layer:
    """What layer 0 proves of every layer: sizes, and which optional parts there are."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    linear: Mapping[str, tuple[int, int]]  # module -> shape of its weight

    def tensors(self, index: int, norms: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's tensors, by name."""
        prefix = f"model.layers.{index}."
        biased = [part for part in self.linear if (self.qkv_bias, self.o_bias, self.mlp_bias)[_group(part)]]
        shapes: dict[str, tuple[int, ...]] = {f"{prefix}{norm}.weight": (self.hidden,) for norm in norms}
        shapes |= {f"{prefix}{norm}.weight": (self.head_dim,) for norm in _QK_NORMS if self.qk_norm}
        shapes |= {f"{prefix}{part}.weight": shape for part, shape in self.linear.items()}
        shapes |= {f"{prefix}{part}.bias": self.linear[part][:1] for part in biased}
        return shapes


class _Proof:
    """One checkpoint's proof; keeps the warnings on the way."""

    def __init__(
        self,
        tensors: Mapping[str, TensorRef],
        config: Claims,
        place: str,
        spell: Callable[[str], str] = str,
    ) -> None:
        self.tensors = tensors
        self.config = config
        self.place = place
        self.spell = spell
        self.warnings: list[str] = []

    def result(self) -> tuple[DecoderConfig, tuple[str, ...]]:
        family = self.family()
        num_layers = self.num_layers()
        vocab_size, hidden = self.matrix(_EMBED)
        layer = self.layer(hidden, hidden, family)
        tied = _HEAD not in self.tensors

        expected: dict[str, tuple[int, ...]] = {_EMBED: (vocab_size, hidden), _NORM: (hidden,)}
        if not tied:
            expected[_HEAD] = (vocab_size, hidden)
        for index in range(num_layers):
            expected |= layer.tensors(index, _LAYER_NORMS)
        check_tensors(self.tensors, expected, self.place, self.spell)
        dtype = self.dtype(
            [f"model.layers.{index}.{part}.weight" for index in range(num_layers) for part in layer.linear]
        )

        claim = self.claim
        claim("vocab_size", vocab_size)
        claim("hidden_size", hidden)
        claim("num_hidden_layers", num_layers)
        claim("tie_word_embeddings", tied)
        self.claim_layer(layer)
        if family == "llama":
            claim("attention_bias", layer.qkv_bias)
            claim("mlp_bias", layer.mlp_bias)
        claim("dtype" if self.config.get("dtype") is not None else "torch_dtype", _FLOATS[dtype])

        self.check_activation()
        window, sliding_layers = sliding(self.config, family, num_layers)
        proved = DecoderConfig(
            family=family,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=layer.intermediate,
            num_layers=num_layers,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            rms_norm_eps=self.config.number("rms_norm_eps", 1e-6),
            rope=rope(self.config),
            max_position=self.config.integer("max_position_embeddings"),
            tie_embeddings=tied,
            qkv_bias=layer.qkv_bias,
            o_bias=layer.o_bias,
            mlp_bias=layer.mlp_bias,
            qk_norm=layer.qk_norm,
            sliding_window=window,
            sliding_layers=sliding_layers,
            dtype=dtype,
        )
        return proved, tuple(self.warnings)

    def layer(self, hidden: int, attention_width: int, family: str | None = None) -> _Layer:
        """What layer 0 says of all layers; afterwards they are checked to be like it.

        Args:
            hidden: width of the residual stream; attention_width: of what q, k and v read.
            family: checked for the parts that it must or cannot have; None: any.
        """
        qkv_bias = any(f"model.layers.0.{part}.bias" in self.tensors for part in _QKV)
        o_bias = f"model.layers.0.{_O}.bias" in self.tensors
        mlp_bias = any(f"model.layers.0.{part}.bias" in self.tensors for part in _MLP)
        qk_norm = any(f"model.layers.0.{part}.weight" in self.tensors for part in _QK_NORMS)
        if family is not None:
            self.check_family(family, qkv_bias, o_bias, mlp_bias, qk_norm)
        intermediate = self.matrix("model.layers.0.mlp.gate_proj.weight")[0]
        q_rows = self.matrix(f"model.layers.0.{_QKV[0]}.weight")[0]
        kv_rows = self.matrix(f"model.layers.0.{_QKV[1]}.weight")[0]
        head_dim, num_heads, num_kv_heads = self.heads(hidden, q_rows, kv_rows, qk_norm)
        linear = {
            _QKV[0]: (q_rows, attention_width),
            _QKV[1]: (kv_rows, attention_width),
            _QKV[2]: (kv_rows, attention_width),
            _O: (hidden, q_rows),
            _MLP[0]: (intermediate, hidden),
            _MLP[1]: (intermediate, hidden),
            _MLP[2]: (hidden, intermediate),
        }
        return _Layer(
            hidden=hidden,
            intermediate=intermediate,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            linear=linear,
        )

    def family(self) -> Literal["llama", "mistral", "qwen2", "qwen3"]:
        claimed = self.config.get("model_type")
        if claimed not in FAMILIES:
            inside = sorted({re.sub(r"\d+", "N", name) for name in self.tensors})
            raise ArchitectureError(
                f"model_type {claimed!r}"[:100] + f", with tensors such as {', '.join(inside[:4])}"[:300],
                place=f"{self.config.place}:model_type",
                allowed=", ".join(FAMILIES),
            )
        return cast(Literal["llama", "mistral", "qwen2", "qwen3"], claimed)

    def check_family(self, family: str, qkv_bias: bool, o_bias: bool, mlp_bias: bool, qk_norm: bool) -> None:
        """Parts that a family always has or never has; its own implementation would not run them."""
        always_qkv = family == "qwen2"
        rules = (
            (qk_norm == (family == "qwen3"), "norms of queries and keys", family == "qwen3"),
            (not always_qkv or qkv_bias, "biases of q, k and v", True),
            (family != "mistral" or not qkv_bias, "biases of q, k and v", False),
            (family not in ("mistral", "qwen2") or not o_bias, "a bias of o", False),
            (family == "llama" or not mlp_bias, "biases in the MLP", False),
        )
        for holds, what, needed in rules:
            if not holds:
                raise ContradictionError(
                    f"model_type {family!r} {'without' if needed else 'with'} {what}",
                    place=f"{self.place}:model.layers.0",
                    allowed=f"{what} are {'always' if needed else 'never'} part of this family",
                )

    def num_layers(self) -> int:
        found = {int(match[1]) for name in self.tensors if (match := _LAYER.fullmatch(name))}
        if not found:
            names = ", ".join(sorted(self.tensors)[:4])
            raise ArchitectureError(
                f"no tensor named model.layers.N…, but {names}"[:300],
                place=self.place,
                allowed=f"a decoder of the families {', '.join(FAMILIES)}",
            )
        gap = next((layer for layer in range(max(found)) if layer not in found), None)
        if gap is not None:
            raise MissingTensorError(
                f"no tensor of layer {gap}, and layer {max(found)} exists",
                place=f"{self.place}:model.layers.{gap}",
            )
        return len(found)

    def matrix(self, name: str) -> tuple[int, int]:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise MissingTensorError("it is not there", place=self.at(name))
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise ContradictionError(f"shape {list(tensor.shape)}", place=self.at(name), allowed="a matrix")
        return tensor.shape[0], tensor.shape[1]

    def heads(self, hidden: int, q_rows: int, kv_rows: int, qk_norm: bool) -> tuple[int, int, int]:
        """(head_dim, heads, KV heads). The norms of q and k prove head_dim; else it is a claim to check."""
        claimed_heads = self.config.integer("num_attention_heads")
        norm = self.tensors.get(f"model.layers.0.{_QK_NORMS[0]}.weight")
        if qk_norm and norm is not None and len(norm.shape) == 1 and norm.shape[0] > 0:
            head_dim = norm.shape[0]
            self.claim("head_dim", head_dim)
        elif self.config.get("head_dim") is not None:
            head_dim = self.config.integer("head_dim")
        elif hidden % claimed_heads:
            raise self.config.error(
                "num_attention_heads",
                f"{claimed_heads}, and no head_dim",
                f"a divisor of hidden_size {hidden}",
            )
        else:
            head_dim = hidden // claimed_heads
        if q_rows % head_dim or (not qk_norm and q_rows != claimed_heads * head_dim):
            raise ContradictionError(
                f"{q_rows} rows of q, and config.json says {claimed_heads} heads of {head_dim}",
                place=self.at(f"model.layers.0.{_QKV[0]}.weight"),
                allowed="rows = heads × head_dim",
            )
        if kv_rows % head_dim or (q_rows // head_dim) % (kv_rows // head_dim):
            raise ContradictionError(
                f"{kv_rows} rows of k, {q_rows} of q, heads of {head_dim}",
                place=self.at(f"model.layers.0.{_QKV[1]}.weight"),
                allowed="whole heads, and a number of heads that the number of KV heads divides",
            )
        if head_dim % 2:
            raise ContradictionError(
                f"heads of {head_dim}", place=self.place, allowed="an even head_dim (rope)"
            )
        return head_dim, q_rows // head_dim, kv_rows // head_dim

    def dtype(self, names: list[str]) -> str:
        found = {self.tensors[name].dtype for name in names}
        if len(found) > 1:
            raise ContradictionError(
                f"linear layers in {' and '.join(sorted(found))}", place=self.place, allowed="one dtype"
            )
        return found.pop()

    def check_activation(self) -> None:
        if self.config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise self.config.error("hidden_act", repr(self.config.get("hidden_act"))[:100], "silu")

    def claim_layer(self, layer: _Layer) -> None:
        self.claim("intermediate_size", layer.intermediate)
        self.claim("num_attention_heads", layer.num_heads)
        self.claim("num_key_value_heads", layer.num_kv_heads)

    def claim(self, key: str, proved: object) -> None:
        self.warnings += self.config.contradicted(key, proved)

    def at(self, name: str) -> str:
        return f"{self.place}:{self.spell(name)}"


def _group(part: str) -> int:
    """0 for q, k, v; 1 for o; 2 for the MLP."""
    return 0 if part in _QKV else 1 if part == _O else 2
