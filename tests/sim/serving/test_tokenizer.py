"""A served engine with a tokenizer file of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sim.errors import ConfigError
from sim.serving.filler import NUMBERS
from sim.serving.text import FileTokens
from tests.sim.serving.client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

tokenizers: Any = pytest.importorskip("tokenizers", reason="pip install tokenizers")

WORDS = "the quick brown fox jumps over a lazy dog"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a byte-level tokenizer of a few words."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([f" {WORDS}"] * 9, trainer)
    found = tmp_path_factory.mktemp("tokenizer")
    made.save(str(found / "tokenizer.json"))
    return found


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    client = Client(tokens=FileTokens(folder))
    yield client
    client.end()


def test_prompts_and_answers_have_the_tokens_of_the_file(
    client: Client, folder: Path
) -> None:
    encode = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    prompt = f"{WORDS} and what else"
    found = client.completion(prompt=prompt, max_tokens=100, ignore_eos=True)
    num_tokens = len(encode(prompt).ids)
    assert found["usage"]["prompt_tokens"] == num_tokens != -(-len(prompt) // 4)
    text = found["choices"][0]["text"]
    assert len(encode(text).ids) == 100
    assert all(word.isalpha() for word in text.split())
    word = max(text.split(), key=len)
    said = text.partition(word)[0]
    stopped = client.completion(
        prompt=prompt, max_tokens=100, ignore_eos=True, stop=word
    )
    assert stopped["choices"][0]["text"] == said
    assert stopped["usage"]["completion_tokens"] == len(said.split()) + 1


def test_ids_and_texts_are_told(client: Client) -> None:
    status, text = client.ask(
        "/tokenize", {"prompt": f" {WORDS}", "return_token_strs": True}
    )
    told = json.loads(text)
    assert status == 200
    assert told["count"] == len(told["tokens"]) == len(WORDS.split())
    assert told["token_strs"][0] == "Ġthe"
    status, text = client.ask("/detokenize", {"tokens": told["tokens"]})
    assert json.loads(text) == {"prompt": f" {WORDS}"}
    messages = [{"role": "user", "content": WORDS}]
    assert client.ask("/tokenize", {"messages": messages})[0] == 200
    assert client.ask("/tokenize", {"prompt": 3})[0] == 400
    assert client.ask("/detokenize", {"tokens": ["a"]})[0] == 400


def test_equal_beginnings_of_text_and_of_ids_are_found(client: Client) -> None:
    long = f"{WORDS} " * 20
    before = client.engine.run.scheduler.summary()["prefix_cache_hits"]
    ids = json.loads(client.ask("/tokenize", {"prompt": f"{long}first"})[1])["tokens"]
    for prompt in (f"{long}first", f"{long}second", ids):
        client.completion(prompt=prompt, max_tokens=2, ignore_eos=True)
    hits = client.engine.run.scheduler.summary()["prefix_cache_hits"] - before
    assert hits > len(ids)


def test_a_vocabulary_without_words_answers_with_numbers(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a"))
    made.save(str(tmp_path / "tokenizer.json"))
    assert FileTokens(tmp_path / "tokenizer.json").filler is NUMBERS


def test_a_file_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"give a tokenizer\.json") as caught:
        FileTokens(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        FileTokens(tmp_path / "nowhere.json")


def test_filler_counts_its_characters_both_ways() -> None:
    for num_tokens in (0, 1, 999, 1000, 1001, 2500):
        text = NUMBERS.text(0, num_tokens)
        assert NUMBERS.num_characters(num_tokens) == len(text)
        assert NUMBERS.num_tokens(len(text)) == num_tokens
        assert NUMBERS.num_tokens(len(text) + 1) == num_tokens + 1
