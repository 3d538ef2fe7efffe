"""A bundle is refused when anything about it changed, each kind by its own rule."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.bundle import MANIFEST, is_older_bundle, open_bundle, seal_bundle
from engines.errors import TrtspecError

CACHE = {"layers": 1, "kv_heads": 1, "head_dim": 8}
MANIFEST_FIELDS: dict[str, Any] = {
    "name": "tiny",
    "created": "2026-01-02T03:04:05Z",
    "trtspec_version": "0.1.0",
    "command": ["trtspec", "build", "tiny.yaml"],
    "tools": {"onnx": "1.0"},
    "target": {"path": "m", "fingerprint": "f" * 64, "family": "llama", "parameters": 7, "dtype": "F32"},
    "engine": {
        "method": "ngram",
        "gamma": 2,
        "max_batch_size": 1,
        "max_seq_len": 16,
        "vocab_size": 5,
        "target_cache": CACHE,
        "eos_token_ids": [2],
        "margin_tolerance": 0.002,
        "step_cost": [1.0, 1.1, 1.2],
    },
}


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "memory"))
    folder = tmp_path / "bundle"
    (folder / "weights" / "target").mkdir(parents=True)
    (folder / "step.onnx").write_bytes(b"graph")
    (folder / "weights" / "target" / "model.safetensors").write_bytes(b"w" * 100)
    seal_bundle(folder, MANIFEST_FIELDS)
    return folder


def test_a_sealed_bundle_opens(bundle: Path) -> None:
    opened = open_bundle(bundle)
    assert opened.manifest.engine.step_cost == (1.0, 1.1, 1.2)
    assert opened.file("step.onnx").read_bytes() == b"graph"
    assert opened.size == 105
    facts = opened.manifest.files["weights/target/model.safetensors"]
    assert facts.sha256 == hashlib.sha256(b"w" * 100).hexdigest()


GOLDEN = """{
  "schema_version": 2,
  "name": "tiny",
  "created": "2026-01-02T03:04:05Z",
  "trtspec_version": "0.1.0",
  "command": [
    "trtspec",
    "build",
    "tiny.yaml"
  ],
  "tools": {
    "onnx": "1.0"
  },
  "target": {
    "path": "m",
    "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "family": "llama",
    "parameters": 7,
    "dtype": "F32"
  },
  "drafter": null,
  "pairing": null,
  "engine": {
    "graph": "step.onnx",
    "method": "ngram",
    "gamma": 2,
    "tree": null,
    "confidence_threshold": 0.0,
    "feature_width": 0,
    "exit_layer": null,
    "min_match": 1,
    "lookahead": null,
    "verification": "exact",
    "typical": null,
    "precision": "fp32",
    "lossless": true,
    "lossless_note": "",
    "max_batch_size": 1,
    "max_seq_len": 16,
    "vocab_size": 5,
    "target_cache": {
      "layers": 1,
      "kv_heads": 1,
      "head_dim": 8
    },
    "draft_cache": null,
    "eos_token_ids": [
      2
    ],
    "margin_tolerance": 0.002,
    "step_cost": [
      1.0,
      1.1,
      1.2
    ]
  },
  "measurements": {},
  "files": {
    "step.onnx": {
      "sha256": "eef93e1d14482804277fca0172464032d1a4fdbcc338524059fa1e861454ad4d",
      "size": 5
    },
    "weights/target/model.safetensors": {
      "sha256": "6ff1386a6f0d444e2af43e9a9e1cdc1394709fc87b5c2a625e16041fec2b1131",
      "size": 100
    }
  }
}
"""


def test_manifest_text_is_stable(bundle: Path) -> None:
    """Order, layout and numbers are part of the format: others diff and sign it."""
    assert (bundle / MANIFEST).read_text() == GOLDEN
    digest = hashlib.sha256(GOLDEN.encode()).hexdigest()
    assert (bundle / "_COMPLETE").read_text() == digest + "\n"


def reseal(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit the manifest as someone would who knows about `_COMPLETE`."""
    data = json.loads((bundle / MANIFEST).read_text())
    change(data)
    (bundle / MANIFEST).write_text(json.dumps(data))
    complete(bundle)


def complete(bundle: Path) -> None:
    (bundle / "_COMPLETE").write_text(hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest())


def edit_weights(bundle: Path) -> None:
    file = bundle / "weights/target/model.safetensors"
    stat = file.stat()
    file.write_bytes(b"w" * 99 + b"x")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # even with its time put back


def escape(bundle: Path) -> None:
    (bundle.parent / "outside").write_bytes(b"graph")

    def change(data: dict[str, Any]) -> None:
        data["files"]["../outside"] = data["files"]["step.onnx"]

    reseal(bundle, change)


def link_out(bundle: Path) -> None:
    (bundle.parent / "outside").write_bytes(b"graph")
    (bundle / "step.onnx").unlink()
    (bundle / "step.onnx").symlink_to(bundle.parent / "outside")


TAMPERING: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda b: b.rename(b.with_name("gone")), "bundle.incomplete"),
    "no _COMPLETE": (lambda b: (b / "_COMPLETE").unlink(), "bundle.incomplete"),
    "_COMPLETE edited": (lambda b: (b / "_COMPLETE").write_text("0" * 64), "bundle.edited"),
    "manifest edited": (
        lambda b: (b / MANIFEST).write_text((b / MANIFEST).read_text().replace('"gamma": 2', '"gamma": 3')),
        "bundle.edited",
    ),
    "weights edited": (edit_weights, "bundle.edited"),
    "weights truncated": (lambda b: os.truncate(b / "weights/target/model.safetensors", 50), "bundle.edited"),
    "graph missing": (lambda b: (b / "step.onnx").unlink(), "bundle.missing-file"),
    "extra file": (lambda b: (b / "weights/notes").write_text("x"), "bundle.unexpected-file"),
    "newer schema": (lambda b: reseal(b, lambda d: d.update(schema_version=3)), "bundle.schema"),
    "unknown field": (lambda b: reseal(b, lambda d: d.update(color="red")), "bundle.schema"),
    "field missing": (lambda b: reseal(b, lambda d: d.pop("engine")), "bundle.schema"),
    "wrong type": (lambda b: reseal(b, lambda d: d["engine"].update(gamma="two")), "bundle.schema"),
    "absolute path": (
        lambda b: reseal(b, lambda d: d["files"].update({str(b / "step.onnx"): d["files"]["step.onnx"]})),
        "bundle.missing-file",
    ),
    "no object": (
        lambda b: ((b / MANIFEST).write_text("[]"), complete(b)),
        "bundle.schema",
    ),
    "key twice": (
        lambda b: ((b / MANIFEST).write_text('{"schema_version": 1, "schema_version": 1}'), complete(b)),
        "file.unreadable",
    ),
    "γ below 0": (lambda b: reseal(b, lambda d: d["engine"].update(gamma=-1)), "bundle.schema"),
    "lookahead without its γ": (
        lambda b: reseal(
            b,
            lambda d: d["engine"].update(
                method="lookahead", gamma=3, lookahead={"window": 4, "ngram": 3, "guesses": 4}
            ),
        ),
        "bundle.schema",
    ),
    "lookahead too deep": (
        lambda b: reseal(
            b,
            lambda d: d["engine"].update(
                method="lookahead", gamma=33, lookahead={"window": 33, "ngram": 3, "guesses": 4}
            ),
        ),
        "bundle.schema",
    ),
    "a threshold without confidence": (
        lambda b: reseal(b, lambda d: d["engine"].update(confidence_threshold=0.5)),
        "bundle.schema",
    ),
    "unknown method": (lambda b: reseal(b, lambda d: d["engine"].update(method="magic")), "bundle.schema"),
    "empty weights": (lambda b: os.truncate(b / "weights/target/model.safetensors", 0), "bundle.edited"),
    "dangling link": (
        lambda b: ((b / "step.onnx").unlink(), (b / "step.onnx").symlink_to("nowhere")),
        "bundle.link",
    ),
    "pipe": (lambda b: ((b / "step.onnx").unlink(), os.mkfifo(b / "step.onnx")), "bundle.missing-file"),
    "extra link": (lambda b: (b / "notes").symlink_to("step.onnx"), "bundle.link"),
    "_COMPLETE empty": (lambda b: (b / "_COMPLETE").write_text(""), "bundle.edited"),
    "path escape": (escape, "bundle.missing-file"),
    "link out": (link_out, "bundle.link"),
}


@pytest.mark.parametrize("kind", sorted(TAMPERING))
def test_tampering_is_refused(bundle: Path, kind: str) -> None:
    open_bundle(bundle)  # its digests are remembered from here on
    tamper, rule = TAMPERING[kind]
    tamper(bundle)
    with pytest.raises(TrtspecError) as caught:
        open_bundle(bundle)
    assert caught.value.rule == rule
    assert caught.value.remedy


def test_manifest_that_is_no_json(bundle: Path) -> None:
    (bundle / MANIFEST).write_text("{")
    (bundle / "_COMPLETE").write_text(hashlib.sha256(b"{").hexdigest())
    with pytest.raises(TrtspecError, match="not JSON"):
        open_bundle(bundle)


def test_an_older_versions_bundle_is_known(bundle: Path) -> None:
    """A build may replace it; one that was touched, or a newer one, it may not."""
    assert not is_older_bundle(bundle)
    reseal(bundle, lambda data: data.update(schema_version=1))
    assert is_older_bundle(bundle)
    (bundle / "mine.txt").write_text("notes")
    assert not is_older_bundle(bundle)
    (bundle / "mine.txt").unlink()
    reseal(bundle, lambda data: data.update(schema_version=3))
    assert not is_older_bundle(bundle)
