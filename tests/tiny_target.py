"""A target that is quick to train drafters for: five random layers, one token a character."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = "<s>{% for turn in messages %}{{ turn['content'] }}</s>{% endfor %}A:"
CHARACTERS = " 0123456789:?.," + "abcdefghijklmnopqrstuvwxyz" + "APROMTSNDEH-"
STOP = 2
VOCAB = 64


def save_tiny_target(folder: Path, layers: int = 5) -> Path:
    """The checkpoint folder, tokenizer and chat template included."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=STOP,
        pad_token_id=STOP,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": STOP}
    for character in dict.fromkeys(CHARACTERS):
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_text(file: Path, count: int = 60) -> Path:
    """Prompts with answers that are easy to learn."""
    lines = [json.dumps({"prompt": f"what is {i}?", "answer": f"it is {i}, {i}."}) for i in range(count)]
    file.write_text("\n".join(lines) + "\n")
    return file
