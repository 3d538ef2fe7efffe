"""Facts about tokenizers equal what the tokenizers package says, and contradictions are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from random_checkpoints import write_tokenizer
from tokenizers import Tokenizer, models, trainers

from builders.checkpoints.claims import Claims, ConfigError
from builders.checkpoints.files import BadJsonError
from builders.checkpoints.tokenizer import TokenizerError, read_tokenizer
from builders.checkpoints.types import TokenizerFacts


def read(path: Path, **config: Any) -> TokenizerFacts:
    facts, _ = read_tokenizer(path, Claims(config, path / "config.json"))
    assert facts is not None
    return facts


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordlevel"])
def test_vocabulary_equals_the_tokenizers_package_s(tmp_path: Path, kind: str) -> None:
    model, trainer = {
        "bpe": (models.BPE(), trainers.BpeTrainer(vocab_size=40, show_progress=False)),
        "unigram": (models.Unigram(), trainers.UnigramTrainer(vocab_size=40, show_progress=False)),
        "wordlevel": (models.WordLevel(), trainers.WordLevelTrainer(vocab_size=40, show_progress=False)),
    }[kind]
    tokenizer = Tokenizer(model)
    tokenizer.train_from_iterator(["the quick brown fox", "jumps over the lazy dog"], trainer)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    facts = read(tmp_path)
    assert facts.vocab == tokenizer.get_vocab(with_added_tokens=True)
    assert facts.size == max(facts.vocab.values()) + 1
    assert (facts.special, facts.eos_token_ids, facts.chat_template) == ({}, (), None)


def test_roles_and_their_spellings(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "b", "lstrip": False},
        "eos_token": "c",
        "pad_token": None,
        "unk_token": "?",
    }
    write_tokenizer(tmp_path, ["a", "b", "c"], config=config)
    facts, warnings = read_tokenizer(tmp_path, Claims({}, "config.json"))
    assert facts is not None
    assert facts.special == {"bos_token": 1, "eos_token": 2}
    assert facts.eos_token_ids == (2,)
    assert warnings == ("tokenizer_config.json names '?' as unk_token: no such token",)


def test_where_the_end_comes_from(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["a", "b", "c"], config={"eos_token": "c"})
    assert read(tmp_path).eos_token_ids == (2,)
    assert read(tmp_path, eos_token_id=1).eos_token_ids == (1,)
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [0, 2, 0]}')
    assert read(tmp_path, eos_token_id=1).eos_token_ids == (0, 2)
    generation.write_text('{"eos_token_id": null}')
    assert read(tmp_path, eos_token_id=1).eos_token_ids == (1,)
    for wrong in ("x", -1, [], [True], [[1]], 1.0):
        generation.write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(ConfigError, match=r"generation_config\.json:eos_token_id"):
            read(tmp_path)


def test_chat_templates(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["a"], config={"chat_template": "in the config"})
    assert read(tmp_path).chat_template == "in the config"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_tokenizer(tmp_path, ["a"], config={"chat_template": several})
    assert read(tmp_path).chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("a file: é\n", encoding="utf-8")
    assert read(tmp_path).chat_template == "a file: é\n"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BadJsonError, match="not UTF-8"):
        read(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    write_tokenizer(tmp_path, ["a"], config={"chat_template": 3})
    with pytest.raises(TokenizerError, match="chat_template"):
        read(tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path, Claims({}, "config.json")) == (None, ())
    (tmp_path / "tokenizer.model").write_bytes(b"")
    facts, warnings = read_tokenizer(tmp_path, Claims({}, "config.json"))
    assert facts is None
    assert "tokenizer.model" in warnings[0]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({}, "no vocabulary"),
        ({"model": 3}, "no vocabulary"),
        ({"model": {"vocab": "x"}}, "no vocabulary"),
        ({"model": {"vocab": {}}}, "no tokens"),
        ({"model": {"vocab": {"a": -1}}}, "'a': -1"),
        ({"model": {"vocab": {"a": True}}}, "'a': True"),
        ({"model": {"vocab": {"a": 1 << 40}}}, "'a': "),
        ({"model": {"vocab": [["a", 0.0], 3]}}, "None: 1"),
        ({"model": {"vocab": {"a": 0, "b": 0}}}, "id 0 is 'a' and 'b'"),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "a", "id": 1}]}, "the ids 0 and 1"),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "b"}]}, "'b': None"),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [3]}, r"\[3\]"),
    ],
)
def test_contradictions(tmp_path: Path, content: Any, found: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=found):
        read(tmp_path)


def test_a_role_that_is_no_token(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["a"], config={"bos_token": 3})
    with pytest.raises(TokenizerError, match="bos_token"):
        read(tmp_path)
