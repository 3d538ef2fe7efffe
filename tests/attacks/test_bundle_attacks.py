"""Bundles made to deceive: every changed bit is noticed, and what a manifest claims is held to its range."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.bundle import COMPLETE, MANIFEST, open_bundle, seal_bundle
from engines.errors import BundleError, TrtspecError

FIELDS: dict[str, Any] = {
    "name": "tiny",
    "created": "2026-01-02T03:04:05Z",
    "trtspec_version": "0.1.0",
    "command": ["trtspec"],
    "tools": {},
    "target": {"path": "m", "fingerprint": "f" * 64, "family": "llama", "parameters": 7, "dtype": "F32"},
    "engine": {
        "method": "none",
        "gamma": 0,
        "max_batch_size": 1,
        "max_seq_len": 16,
        "vocab_size": 5,
        "target_cache": {"layers": 1, "kv_heads": 1, "head_dim": 8},
        "eos_token_ids": [2],
        "margin_tolerance": 0.002,
        "step_cost": [1.0],
    },
}


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "memory"))
    folder = tmp_path / "bundle"
    (folder / "weights").mkdir(parents=True)
    (folder / "step.onnx").write_bytes(b"graph")
    (folder / "weights" / "w.safetensors").write_bytes(bytes(range(64)))
    seal_bundle(folder, FIELDS)
    return folder


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), data=st.data())
def test_every_flipped_bit_is_noticed(bundle: Path, place: float, bit: int, data: st.DataObject) -> None:
    names = ("step.onnx", "weights/w.safetensors", MANIFEST, COMPLETE)
    file = bundle / data.draw(st.sampled_from(names))
    before = file.read_bytes()
    changed = bytearray(before)
    changed[int(place * len(before))] ^= 1 << bit
    if changed.strip() == before.strip():
        return  # the newline behind `_COMPLETE`'s digest proves nothing
    file.write_bytes(changed)
    try:
        with pytest.raises(BundleError):
            open_bundle(bundle)
    finally:
        file.write_bytes(before)
    open_bundle(bundle)


def move_out(bundle: Path, name: str) -> None:
    """Put a link in the place of a file or folder, whose bytes stay the same."""
    outside = bundle.parent / "outside"
    shutil.move(bundle / name, outside)
    (bundle / name).symlink_to(outside)


LINKS: dict[str, Callable[[Path], object]] = {
    "graph": lambda b: move_out(b, "step.onnx"),
    "folder": lambda b: move_out(b, "weights"),
    "manifest": lambda b: move_out(b, MANIFEST),
    "_COMPLETE": lambda b: move_out(b, COMPLETE),
    "an extra folder": lambda b: (b / "notes").symlink_to("/"),
    "itself": lambda b: (b / "weights" / "loop").symlink_to(b),
    "a file of the bundle": lambda b: (b / "copy").symlink_to("step.onnx"),
}


@pytest.mark.parametrize("kind", sorted(LINKS))
def test_links_are_refused(bundle: Path, kind: str) -> None:
    """Equal bytes or not: what a link leads to can change without the bundle's folder changing."""
    LINKS[kind](bundle)
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle)
    assert caught.value.rule == "bundle.link"


def test_the_bundle_itself_may_be_reached_through_a_link(bundle: Path) -> None:
    (bundle.parent / "current").symlink_to(bundle)
    assert open_bundle(bundle.parent / "current").manifest.name == "tiny"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("engine.vocab_size", -1),
        ("engine.vocab_size", 0),
        ("engine.target_cache.layers", 0),
        ("engine.target_cache.head_dim", -8),
        ("engine.margin_tolerance", -0.1),
        ("engine.margin_tolerance", float("inf")),  # would excuse every divergence
        ("engine.margin_tolerance", float("nan")),
        ("engine.step_cost", [1.0, float("nan")]),
        ("engine.step_cost", [1.0, 0.0]),
        ("engine.lossless", "perhaps"),
        ("engine.verification", "typical"),
        ("files", {"step.onnx": {"sha256": "short", "size": 5}}),
        ("files", {"step.onnx": {"sha256": "f" * 64, "size": -5}}),
        ("name", ["deep"]),
        ("schema_version", 10**400),
    ],
    ids=str,
)
def test_claims_out_of_range(bundle: Path, path: str, value: object) -> None:
    """By someone who seals the edited manifest again."""
    data = json.loads((bundle / MANIFEST).read_text())
    *outer, last = path.split(".")
    inner = data
    for key in outer:
        inner = inner[key]
    inner[last] = value
    text = json.dumps(data)
    (bundle / MANIFEST).write_text(text)
    (bundle / COMPLETE).write_text(sha256(text.encode()).hexdigest())
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle)
    assert caught.value.rule == "bundle.schema"


@pytest.mark.parametrize("content", [b"x" * 10_000, b"\xff" * 64, b"\x00", b""], ids=lambda c: repr(c[:4]))
def test_a_seal_that_is_none(bundle: Path, content: bytes) -> None:
    (bundle / COMPLETE).write_bytes(content)
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle)
    assert caught.value.rule == "bundle.edited"


def test_a_manifest_of_gigabytes_is_not_read(bundle: Path) -> None:
    """Sealed, sparse, and of one key that never ends."""
    with (bundle / MANIFEST).open("wb") as file:
        file.write(b'{"')
        file.truncate(64 << 20)
    (bundle / COMPLETE).write_text(sha256((bundle / MANIFEST).read_bytes()).hexdigest())
    with pytest.raises(TrtspecError, match="larger"):
        open_bundle(bundle)


def test_names_that_are_not_utf8(bundle: Path) -> None:
    with open(os.fsencode(bundle) + b"/\xff\n", "wb"):  # noqa: PTH123 - pathlib takes no bytes
        pass
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle)
    assert caught.value.rule == "bundle.unexpected-file"
