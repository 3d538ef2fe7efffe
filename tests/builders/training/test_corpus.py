"""Conversations that the target writes, their states, the split, and text of users."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_target import STOP, VOCAB
from transformers import AutoModelForCausalLM

from builders.training.corpus import GenerationPlan, write_conversations
from builders.training.dialogue import Conversation, Template, normal, read_conversations, states_of
from builders.training.features import FeatureStore, held_out
from builders.training.states import collect_states, tap_layers, tapped_states
from builders.training.text import TrainingTextError, read_user_text
from engines.files import FileError

PLAN = GenerationPlan(seed=2, batch=6, min_prompt=5, max_prompt=40, max_answer=16, top_p=1.0, warm_share=0.3)


class Words(Template):
    """Takes any tokens for a prompt: a random target hardly ever writes words."""

    def decode(self, ids: Any) -> str:
        return " ".join(f"w{i}" for i in ids)


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target).eval()


def write(model: Any, template: Template, file: Path, attempts: Any, **changes: Any) -> list[Conversation]:
    write_conversations(model, template, file, list(attempts), PLAN, **changes)
    return read_conversations(file)


def states_in(file: Path) -> torch.Tensor:
    rows = torch.from_numpy(np.fromfile(states_of(file), np.int16)).view(torch.bfloat16)
    return rows.view(-1, 128).float()


def whole(conversations: list[Conversation]) -> list[Conversation]:
    return [c for c in conversations if c.ids]


def test_the_template_stands_around_the_prompt(target: Path) -> None:
    template = Template(target, [STOP])
    around = template.around("who is it?")
    assert list(template.opening) + template.encode("who is it?") + list(template.middle) == around


def test_answers_are_the_targets_own(model: Any, target: Path, tmp_path: Path) -> None:
    template = Words(target, [STOP])
    found = whole(write(model, template, tmp_path / "c.jsonl", range(40)))
    assert len(found) > 8
    assert {c.temperature for c in found} == {0.0, PLAN.warm_temperature}
    for conversation in found:
        ids, start = conversation.ids, conversation.start
        assert ids[: len(template.opening)] == template.opening
        assert ids[start - len(template.middle) : start] == template.middle
        assert ids[-1] == STOP or len(ids) - start == PLAN.max_answer
        if conversation.temperature == 0:
            with torch.no_grad():
                greedy = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
            assert greedy[start - 1 : -1] == list(ids[start:])


def test_states_are_those_of_one_pass(model: Any, target: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    found = write(model, Words(target, [STOP]), file, range(20))
    states, offset = states_in(file), 0
    for conversation in whole(found):
        count = len(conversation.ids)
        with torch.no_grad():
            hidden, taps = tapped_states(model, torch.tensor([conversation.ids]), use_cache=False)
        wanted = torch.cat([hidden, taps], -1)[0, : count - 1]
        torch.testing.assert_close(states[offset : offset + count - 1], wanted, rtol=1e-2, atol=1e-2)
        offset += count
    assert offset == len(states)


def test_taps_are_what_enters_the_layers(model: Any) -> None:
    ids = torch.tensor([[5, 9, 11, 30]])
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        hidden, taps = tapped_states(model, ids, use_cache=False)
    assert tap_layers(5) == (2, 2, 2)
    assert tap_layers(30) == (2, 15, 27)
    torch.testing.assert_close(taps, torch.cat([states[2]] * 3, -1))
    torch.testing.assert_close(hidden, states[-1])


def test_stopped_generation_goes_on_to_the_same(model: Any, target: Path, tmp_path: Path) -> None:
    template = Words(target, [STOP])
    wanted = {c.index: c for c in write(model, template, tmp_path / "whole.jsonl", range(30))}
    assert sorted(wanted) == list(range(30))
    file = tmp_path / "parts.jsonl"
    write(model, template, file, range(13))
    with file.open("a") as out:
        out.write('{"index": 99, "prom')  # a kill in the middle of a line
    with states_of(file).open("ab") as states:
        states.write(b"half")
    found = {c.index: c for c in write(model, template, file, range(13, 30))}
    assert found == wanted
    assert len(states_in(file)) == sum(len(c.ids) for c in found.values())


def test_given_prompts_are_answered_and_refused_ones_not_written(
    model: Any, target: Path, tmp_path: Path
) -> None:
    template = Words(target, [STOP])
    prompts = [f"who is {i}?" for i in range(9)]
    given = {i: template.unanswered(i, p) for i, p in enumerate(prompts)}
    found = write(model, template, tmp_path / "a.jsonl", range(9), given=given)
    assert {c.index: c.prompt for c in found} == dict(enumerate(prompts))
    assert all(list(c.ids[: c.start]) == template.around(c.prompt) for c in found)
    first = whole(write(model, template, tmp_path / "b.jsonl", range(12)))
    again = write(model, template, tmp_path / "c.jsonl", range(12), excluded=[first[0].prompt.upper()])
    assert {c.prompt for c in whole(again)} == {c.prompt for c in first[1:]}


def test_a_prompt_is_on_one_side_only(model: Any, tmp_path: Path) -> None:
    conversations = [Conversation(i, f"who is {i // 2}", (1, 5, 6, 7), 2, 0.0) for i in range(4000)]
    sides = {c.prompt: held_out(c) for c in conversations}
    assert 0.03 < sum(sides.values()) / len(sides) < 0.07
    assert held_out(Conversation(0, "Who  is 7", (1,), 0, 0.0)) == sides[normal("who is 7")]
    file = tmp_path / "c.jsonl"
    collect_states(model, conversations[:40], file)
    store = FeatureStore([file], 32)
    assert [c.index for c in store.conversations] == list(range(0, 40, 2))  # each prompt once


def test_batches_hold_each_conversation_once(model: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    conversations = [
        Conversation(i, f"p{i}", tuple(int(x) for x in rng.integers(3, VOCAB, rng.integers(5, 30))), 3, 0.0)
        for i in range(50)
    ]
    file = tmp_path / "c.jsonl"
    collect_states(model, conversations, file)
    store = FeatureStore([file], 32)
    groups = list(store.batches(range(50), 100, np.random.default_rng(1)))
    assert sorted(i for g in groups for i in g) == list(range(50))
    assert all(len(g) * max(len(conversations[i].ids) for i in g) <= 100 for g in groups)
    batch = store.batch([3, 8], taps=True, device=torch.device("cpu"))
    assert batch.taps is not None
    for row, i in enumerate((3, 8)):
        ids = conversations[i].ids
        with torch.no_grad():
            hidden, taps = tapped_states(model, torch.tensor([ids]), use_cache=False)
        torch.testing.assert_close(batch.hidden[row, : len(ids)].float(), hidden[0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(batch.taps[row, : len(ids)].float(), taps[0], rtol=1e-2, atol=1e-2)
        assert batch.ids[row, : len(ids)].tolist() == list(ids)
        assert batch.answer[row].nonzero()[:, 0].tolist() == list(range(3, len(ids)))
        assert int(batch.valid[row].sum()) == len(ids)


def test_text_of_users(target: Path, tmp_path: Path) -> None:
    template = Template(target, [STOP])
    file = tmp_path / "t.jsonl"
    lines = [{"prompt": "who?", "answer": "me."}, {"prompt": "and?"}, {"text": "some text"}]
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    conversations, prompts = read_user_text(file, template)
    assert [(p.prompt, list(p.ids), p.start) for p in prompts] == [("and?", template.around("and?"), 8)]
    answered, document = conversations
    assert list(answered.ids) == [*template.around("who?"), *template.encode("me."), STOP]
    assert answered.start == len(template.around("who?"))
    assert (list(document.ids), document.start) == (template.encode("some text"), 1)
    plain = tmp_path / "t.txt"
    plain.write_text("one\ntext\n\n\nanother\n")
    assert [c.prompt for c in read_user_text(plain, template)[0]] == ["one\ntext", "another"]


def test_a_byte_order_mark_is_no_text(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "who?"}\r\n')
    assert [c.prompt for c in read_user_text(file, Template(target, [STOP]))[1]] == ["who?"]


def test_states_that_are_missing_are_found(model: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    conversations = [Conversation(i, f"p{i}", (1, 5, 6, 7), 2, 0.0) for i in range(9)]
    collect_states(model, conversations, file)
    os.truncate(states_of(file), 1000)
    with pytest.raises(FileError, match="shorter"):
        collect_states(model, conversations, file)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', 2),
        ('{"prompt": "a"}\n\n[1]\n', 3),
        ('{"prompt": 7}\n', 1),
        ('{"prompt": " "}\n', 1),
        ('{"prompt": "a \\ud800"}\n', 1),
        ('{"question": "a"}\n', 1),
        ('{"prompt": "a", "answer": "b", "text": "c"}\n', 1),
        ("[" * 100_000, 1),
        ('{"text": "' + "x" * (5 << 20) + '"}\n', 1),
        ("\n\n", None),
        ("", None),
    ],
)
def test_bad_text_is_named_by_line(content: str, line: int | None, target: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(content)
    with pytest.raises(TrainingTextError) as caught:
        read_user_text(file, Template(target, [STOP]))
    assert caught.value.place == (f"{file}:{line}" if line else str(file))


def test_unreadable_text(target: Path, tmp_path: Path) -> None:
    template = Template(target, [STOP])
    with pytest.raises(FileError):
        read_user_text(tmp_path / "missing.jsonl", template)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(TrainingTextError, match="no regular file"):  # and does not wait for a writer
        read_user_text(tmp_path / "pipe.jsonl", template)
    file = tmp_path / "t.jsonl"
    file.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(FileError, match="UTF-8"):
        read_user_text(file, template)
