"""From spec to bundle on a tiny model: whole, killed, out of disk, refused."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import heads_zoo
import pytest
import torch
import zoo
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engines.bundle import open_bundle

MAIN = "from pipelines.cli import main; main()"
STAGES = ("emit", "compile")


def make_checkpoint(folder: Path, family: str = "llama", seed: int = 0) -> Path:
    """A random model with a byte-level tokenizer of 97 tokens and a chat template."""
    return add_tokenizer(zoo.save(zoo.make_model(family, seed), folder))


def add_tokenizer(folder: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:97]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "target")


def write_spec(folder: Path, checkpoint: Path, name: str = "tiny", **sections: object) -> Path:
    spec = {
        "name": name,
        "target": {"checkpoint": str(checkpoint)},
        "drafter": {"method": "ngram", "gamma": 3},
        "limits": {"max_batch_size": 2, "max_seq_len": 250},
        **sections,
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(spec))  # JSON is YAML
    return file


def start(
    folder: Path, *arguments: str, file_limit: int | None = None, main: str = MAIN
) -> subprocess.Popen[str]:
    def limit() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs inherit it ignored
        if file_limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", main, *arguments],
        cwd=folder,
        env={**os.environ, "TRTSPEC_CACHE": str(folder / "memory"), "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    )


def run(folder: Path, *arguments: str, **options: int) -> tuple[int, str, str]:
    process = start(folder, *arguments, **options)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def hashes(bundle: Path) -> dict[str, str]:
    return {name: facts.sha256 for name, facts in open_bundle(bundle).manifest.files.items()}


def leftovers(folder: Path) -> list[str]:
    return [str(p) for p in folder.rglob(".*tmp-*")]


@pytest.mark.parametrize(
    "sections",
    [
        {"drafter": {"method": "none"}},
        {"drafter": {"method": "layer_skip", "exit_layer": 1, "gamma": 2}},
        {"drafter": {"method": "ngram", "gamma": 2}},
    ],
    ids=["none", "layer_skip", "ngram"],
)
def test_build_generate_inspect(checkpoint: Path, tmp_path: Path, sections: dict[str, object]) -> None:
    spec = write_spec(tmp_path, checkpoint, **sections)
    code, _, err = run(tmp_path, "build", str(spec))
    assert code == 0, err
    assert "where the time goes" in err
    bundle = tmp_path / "build/bundles/tiny"
    manifest = open_bundle(bundle).manifest
    assert len(manifest.engine.step_cost) == manifest.engine.gamma + 1
    assert manifest.measurements["divergences"] == [] or all(
        d["allowed"] for d in manifest.measurements["divergences"]
    )
    code, out, err = run(tmp_path, "generate", str(bundle), "-p", "hello", "-n", "7")
    assert code == 0, err
    assert "tokens/s" in err
    code, out, _ = run(tmp_path, "generate", str(bundle), "-p", "a", "-p", "b", "-n", "4", "--format", "json")
    outputs = json.loads(out)["outputs"]
    assert [o["prompt"] for o in outputs] == ["a", "b"]
    assert all(len(o["tokens"]) == 4 or o["finish_reason"] == "stop_token" for o in outputs)
    code, out, _ = run(tmp_path, "inspect", str(bundle), "--format", "json")
    assert json.loads(out)["found"][0]["engine"]["method"] == manifest.engine.method


def test_draft_model_and_foreign_drafter(checkpoint: Path, tmp_path: Path) -> None:
    good = make_checkpoint(tmp_path / "good", seed=1)
    drafter = {"method": "draft_model", "checkpoint": str(good), "gamma": 2}
    assert run(tmp_path, "build", str(write_spec(tmp_path, checkpoint, drafter=drafter)))[0] == 0
    assert open_bundle(tmp_path / "build/bundles/tiny").manifest.pairing is not None
    code, out, _ = run(tmp_path, "generate", "build/bundles/tiny", "-p", "a", "-n", "9", "--format", "json")
    plain = run(
        tmp_path, "generate", "build/bundles/tiny", "-p", "a", "-n", "9", "--format", "json", "--gamma", "0"
    )
    first, second = (json.loads(text)["outputs"][0] for text in (out, plain[1]))
    assert first["tokens"] == second["tokens"]  # greedy: what is drafted makes no difference
    assert first["acceptance"]["drafted"] > 0 == second["acceptance"]["drafted"]

    foreign = make_checkpoint(tmp_path / "foreign", seed=1)
    text = (foreign / "tokenizer.json").read_text()
    data = json.loads(text)
    vocab = data["model"]["vocab"]
    a, b = list(vocab)[5:7]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (foreign / "tokenizer.json").write_text(json.dumps(data))
    drafter = {"method": "draft_model", "checkpoint": str(foreign), "gamma": 2}
    code, _, err = run(tmp_path, "build", str(write_spec(tmp_path, checkpoint, "other", drafter=drafter)))
    assert code == 1
    assert "pairing." in err
    assert not (tmp_path / "build/bundles/other").exists()


def test_second_run_changes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    spec = str(write_spec(tmp_path, checkpoint))
    assert run(tmp_path, "build", spec)[0] == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "build").rglob("*")}
    assert run(tmp_path, "build", spec)[0] == 0
    after = {p: p.stat().st_mtime_ns for p in (tmp_path / "build").rglob("*")}
    files = {p for p in before if p.is_file() and p.suffix != ".lock"}
    assert {p: before[p] for p in files} == {p: after[p] for p in files}


def test_dry_run_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, "build", "--dry-run", str(write_spec(tmp_path, checkpoint)))
    assert code == 0
    assert "emit" in out
    assert "of memory to run" in out
    assert not (tmp_path / "build").exists()


# Runs the command line, but dies of SIGKILL before the N-th call that changes the disk for good. With
# N = 0 it lives, and tells how many such calls there were.
DIE_AT = """
import atexit, os, signal, sys
count, last = 0, int(sys.argv.pop(1))
def mortal(call):
    def wrapped(*args, **kwargs):
        global count
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapped
for name in ("rename", "replace", "link", "fsync"):
    setattr(os, name, mortal(getattr(os, name)))
atexit.register(lambda: print(f"calls: {count}", file=sys.stderr))
"""


def count_calls(folder: Path, spec: str) -> int:
    """Build undisturbed; how many calls change the disk for good."""
    process = start(folder, "0", "build", spec, main=DIE_AT + MAIN)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return int(err.rsplit("calls: ", 1)[1])


def die(folder: Path, spec: str, point: int) -> None:
    process = start(folder, str(point), "build", spec, main=DIE_AT + MAIN)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, err


def test_killed_at_any_point_the_next_run_finishes(checkpoint: Path, tmp_path: Path) -> None:
    calm, hurried = tmp_path / "calm", tmp_path / "hurried"
    calm.mkdir()
    calls = count_calls(calm, str(write_spec(calm, checkpoint)))
    assert calls > 30
    expected = hashes(calm / "build/bundles/tiny")
    for point in range(1, calls + 1, 3):
        shutil.rmtree(hurried, ignore_errors=True)
        hurried.mkdir()
        spec = str(write_spec(hurried, checkpoint))
        die(hurried, spec, point)
        bundle = hurried / "build/bundles/tiny"
        assert not bundle.exists() or hashes(bundle) == expected
        assert run(hurried, "build", spec)[0] == 0
        assert hashes(bundle) == expected
        assert leftovers(hurried) == []


@pytest.mark.parametrize(
    ("from_end", "stands"), [(2, 3), (1, None), (0, 2)], ids=["before", "between", "after"]
)
def test_killed_while_a_bundle_is_replaced(
    checkpoint: Path, tmp_path: Path, from_end: int, stands: int | None
) -> None:
    """The last three calls: move the old one away, move the new one there, sync the folder."""
    bundle = tmp_path / "build/bundles/tiny"
    calls = count_calls(tmp_path, str(write_spec(tmp_path, checkpoint)))
    spec = str(write_spec(tmp_path, checkpoint, drafter={"method": "ngram", "gamma": 2}))
    die(tmp_path, spec, calls - from_end)
    if stands is None:
        assert not bundle.exists()
    else:
        assert open_bundle(bundle).manifest.engine.gamma == stands
    assert run(tmp_path, "build", spec)[0] == 0
    assert open_bundle(bundle).manifest.engine.gamma == 2
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("point", [2, 6, 11])
def test_interrupt_leaves_nothing_half_written(checkpoint: Path, tmp_path: Path, point: int) -> None:
    """Ctrl-C before the N-th call that changes the disk for good."""
    spec = str(write_spec(tmp_path, checkpoint))
    interrupt = DIE_AT.replace("SIGKILL", "SIGINT")
    process = start(tmp_path, str(point), "build", spec, main=interrupt + MAIN)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "build/bundles/tiny").exists()
    assert run(tmp_path, "build", spec)[0] == 0


@pytest.mark.parametrize("limit", [0, 300, 8_000])
def test_disk_full(checkpoint: Path, tmp_path: Path, limit: int) -> None:
    """A file-size limit stands for a full disk: for every file, for records and tokenizers, for the graph."""
    code, _, err = run(tmp_path, "build", str(write_spec(tmp_path, checkpoint)), file_limit=limit)
    assert code == 3
    assert "machine.disk-full" in err
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "build/bundles/tiny").exists()


def test_two_builds_at_once(checkpoint: Path, tmp_path: Path) -> None:
    spec = str(write_spec(tmp_path, checkpoint))
    both = [start(tmp_path, "build", spec), start(tmp_path, "build", spec)]
    for process in both:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    open_bundle(tmp_path / "build/bundles/tiny")
    for stage in STAGES:
        results = [p for p in (tmp_path / "build/cache" / stage).iterdir() if p.is_dir()]
        assert len(results) == 1


def test_damaged_cache_is_made_again(checkpoint: Path, tmp_path: Path) -> None:
    spec = str(write_spec(tmp_path, checkpoint))
    assert run(tmp_path, "build", spec)[0] == 0
    graph = next((tmp_path / "build/cache/emit").glob("*/step.onnx"))
    os.truncate(graph, 100)  # the bundle's file is the same inode
    code, _, err = run(tmp_path, "build", spec)
    assert code == 0, err
    open_bundle(tmp_path / "build/bundles/tiny")


def test_a_folder_with_other_things_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    taken = tmp_path / "build/bundles/tiny"
    taken.mkdir(parents=True)
    (taken / "notes.txt").write_text("mine")
    code, _, err = run(tmp_path, "build", str(write_spec(tmp_path, checkpoint)))
    assert code == 2
    assert "build.output" in err
    assert (taken / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("sections", "code", "rule"),
    [
        ({"limits": {"max_seq_len": 257}}, 2, "spec.limits"),
        ({"drafter": {"method": "layer_skip", "exit_layer": 3, "gamma": 2}}, 2, "spec.limits"),
        ({"drafter": {"method": "ngram", "gamma": 17}}, 2, "spec.invalid"),
        ({"drafter": {"method": "lookahead", "lookahead": {"window": 33, "ngram": 3}}}, 2, "spec.invalid"),
        ({"target": {"checkpoint": "nowhere"}}, 1, "checkpoint."),
        ({"quantization": {"scheme": "int8"}}, 1, "quantize.shape"),
    ],
)
def test_refusals_leave_no_bundle(
    checkpoint: Path, tmp_path: Path, sections: dict[str, object], code: int, rule: str
) -> None:
    found, _, err = run(tmp_path, "build", str(write_spec(tmp_path, checkpoint, **sections)))
    assert found == code, err
    assert rule in err
    assert not (tmp_path / "build/bundles/tiny").exists()


@pytest.mark.parametrize("tree", [[[0], [1], [2], [3]], {"top_k": 4, "nodes": 9}])
def test_a_tree_wider_than_the_drafters_vocabulary(tree: object, tmp_path: Path) -> None:
    model = heads_zoo.make_deep_model()
    target = add_tokenizer(zoo.save(model, tmp_path / "target"))
    head = heads_zoo.make_eagle3(model, tmp_path / "head", draft_vocab=3)
    drafter = {"method": "eagle3", "checkpoint": str(head), "tree": tree}
    if isinstance(tree, dict):
        drafter["gamma"] = 2
    code, _, err = run(tmp_path, "build", str(write_spec(tmp_path, target, drafter=drafter)))
    assert code == 2, err
    assert "spec.limits" in err and "at most 3" in err and "drafter.tree" in err


def test_nan_weights_are_found(tmp_path: Path) -> None:
    model = zoo.make_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = float("nan")
    folder = make_checkpoint(tmp_path / "m")
    zoo.save(model, folder)
    code, _, err = run(tmp_path, "build", str(write_spec(tmp_path, folder)))
    assert code == 1
    assert "NaN" in err
    assert not (tmp_path / "build/bundles/tiny").exists()


def test_nan_weights_of_a_draft_model_are_found(checkpoint: Path, tmp_path: Path) -> None:
    """Its drafts would be rejected one and all, and nothing else would show."""
    model = zoo.make_model("llama", 1)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    folder = add_tokenizer(zoo.save(model, tmp_path / "draft"))
    drafter = {"method": "draft_model", "checkpoint": str(folder), "gamma": 1}
    code, _, err = run(tmp_path, "build", str(write_spec(tmp_path, checkpoint, drafter=drafter)))
    assert code == 1
    assert "head.not-finite" in err and "model.norm.weight" in err
    assert not (tmp_path / "build/bundles/tiny").exists()


def test_new_weights_of_the_same_shape_are_not_mistaken_for_the_old(tmp_path: Path) -> None:
    """Both checkpoints call their file model.safetensors, and headers stay equal."""
    target, drafter = make_checkpoint(tmp_path / "t"), make_checkpoint(tmp_path / "d", seed=1)
    spec = write_spec(
        tmp_path, target, drafter={"method": "draft_model", "checkpoint": str(drafter), "gamma": 1}
    )
    assert run(tmp_path, "build", str(spec))[0] == 0
    before = hashes(tmp_path / "build/bundles/tiny")
    zoo.save(zoo.make_model("llama", seed=5), target)
    assert run(tmp_path, "build", str(spec))[0] == 0
    after = hashes(tmp_path / "build/bundles/tiny")
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"weights/target/model.safetensors"}


def test_chat_template_is_taken_from_wherever_it_is(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    assert run(tmp_path, "build", str(write_spec(tmp_path, folder)))[0] == 0
    text = (tmp_path / "build/bundles/tiny/tokenizer/chat_template.jinja").read_text()
    assert text == "{{ messages[0].content }}!"


def test_a_target_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = zoo.save(zoo.make_model("llama"), tmp_path / "m")
    code, _, err = run(tmp_path, "build", str(write_spec(tmp_path, folder)))
    assert code == 2
    assert "build.no-tokenizer" in err
    assert not (tmp_path / "build/bundles").exists()


def test_a_foreign_manifest_is_no_bundle(checkpoint: Path, tmp_path: Path) -> None:
    taken = tmp_path / "build/bundles/tiny"
    taken.mkdir(parents=True)
    (taken / "manifest.json").write_text("{}")
    code, _, err = run(tmp_path, "build", str(write_spec(tmp_path, checkpoint)))
    assert code == 2, err
    assert (taken / "manifest.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["weights/target/model.safetensors", "step.onnx"])
def test_a_damaged_bundle_is_built_again(checkpoint: Path, tmp_path: Path, name: str) -> None:
    """Also one with a file that was replaced by a link, whose end stays as it is."""
    spec = str(write_spec(tmp_path, checkpoint))
    assert run(tmp_path, "build", spec)[0] == 0
    bundle, outside = tmp_path / "build/bundles/tiny", tmp_path / "outside"
    expected = hashes(bundle)
    (bundle / name).rename(outside)
    before = outside.read_bytes()
    for damage in (lambda: None, lambda: (bundle / name).symlink_to(outside)):
        damage()
        assert run(tmp_path, "build", spec)[0] == 0
        assert hashes(bundle) == expected
        assert not (bundle / name).is_symlink()
        assert outside.read_bytes() == before
        (bundle / name).unlink()


def test_an_edited_manifest_is_named(checkpoint: Path, tmp_path: Path) -> None:
    spec = str(write_spec(tmp_path, checkpoint))
    assert run(tmp_path, "build", spec)[0] == 0
    manifest = tmp_path / "build/bundles/tiny/manifest.json"
    manifest.write_text(manifest.read_text().replace("tiny", "mine"))
    code, _, err = run(tmp_path, "build", spec)
    assert code == 2
    assert "the manifest was changed after the build" in err


def test_own_files_in_a_bundle_are_not_deleted(checkpoint: Path, tmp_path: Path) -> None:
    spec = str(write_spec(tmp_path, checkpoint))
    assert run(tmp_path, "build", spec)[0] == 0
    notes = tmp_path / "build/bundles/tiny/notes.txt"
    notes.write_text("mine")
    assert run(tmp_path, "build", spec)[0] == 2
    assert notes.read_text() == "mine"


def test_dry_run_finds_what_would_stop_the_build(checkpoint: Path, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, checkpoint, limits={"max_seq_len": 257})
    code, _, err = run(tmp_path, "build", "--dry-run", str(spec))
    assert code == 2
    assert "spec.limits" in err
    code, _, err = run(tmp_path, "build", "--dry-run", str(write_spec(tmp_path, tmp_path / "none.gguf")))
    assert code == 1, err


def test_truncate(checkpoint: Path, tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "truncate", str(checkpoint), "--layers", "2", "-o", "short")
    assert code == 0, err
    from builders.checkpoints.reader import read_checkpoint

    short, whole = read_checkpoint(tmp_path / "short"), read_checkpoint(checkpoint)
    assert short.config.num_layers == 2
    name = "model.layers.1.mlp.down_proj.weight"
    for a, b in ((short.tensors[name], whole.tensors[name]),):
        first = a.file.read_bytes()[a.offset : a.offset + a.length]
        assert first == b.file.read_bytes()[b.offset : b.offset + b.length]
    assert run(tmp_path, "truncate", str(checkpoint), "--layers", "3", "-o", "x")[0] == 2
    assert run(tmp_path, "truncate", "short", "--layers", "1", "-o", "short")[0] == 2
    assert read_checkpoint(tmp_path / "short").config.num_layers == 2


def test_what_the_system_refuses_is_an_error_of_the_environment(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = str(write_spec(tmp_path, checkpoint))
    code, _, err = run(tmp_path, "build", spec, "--cache-dir", "file/cache")
    assert code == 3, err
