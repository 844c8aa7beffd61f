"""Tokenizers, and text that arrives token by token without ever splitting a character."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift_engine.tokenizer import (
    ByteTokenizer,
    ChatTemplateError,
    HfTokenizer,
    IncrementalDetokenizer,
    Tokenizer,
)

TEXTS = st.text(alphabet=st.characters(codec="utf-8"), max_size=60)


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of the kind most models have, with two merges and three special tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(m) for m in merges)])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])
    out = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(out / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (out / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    )
    end = backend.token_to_id("<|end|>")
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    return out


@pytest.fixture(scope="module")
def hf(folder: Path) -> HfTokenizer:
    return HfTokenizer(folder)


@given(TEXTS)
def test_bytes_come_back_as_the_text_they_were(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_never_becomes_a_special_token_of_the_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "<|end|>"}])
    assert [i for i in ids if i in tokenizer.special_ids] == [
        tokenizer.BEGIN,
        tokenizer.TURN_START,
        tokenizer.TURN_END,
        tokenizer.TURN_START,
    ]
    assert tokenizer.decode(ids) == "user\n<|end|>assistant\n"


def test_half_a_surrogate_pair_is_replaced_not_raised(hf: HfTokenizer) -> None:
    for tokenizer in (ByteTokenizer(), hf):
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_no_text_has_fewer_tokens_than_its_characters_need(hf: HfTokenizer) -> None:
    parts = st.sampled_from(["he", "ll", "</s>", "<|end|>", " ", "\u00e9", "\U0001f6a1"])

    @given(st.lists(parts | st.characters(codec="utf-8")).map("".join))
    def holds(text: str) -> None:
        for tokenizer in (ByteTokenizer(), hf):
            assert len(tokenizer.encode(text)) * tokenizer.longest_token_characters >= len(text)

    holds()
    assert hf.longest_token_characters == len("<|end|>")


@settings(max_examples=200)
@given(st.lists(st.integers(0, ByteTokenizer.vocab_size - 1), max_size=120))
def test_streamed_bytes_join_to_the_whole_text_valid_or_not(ids: list[int]) -> None:
    tokenizer = ByteTokenizer()
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=200)
@given(TEXTS)
def test_streamed_text_joins_to_the_whole_and_splits_no_character(text: str) -> None:
    tokenizer = ByteTokenizer()
    pieces = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_streamed_tokens_of_a_real_tokenizer_join_to_the_whole_text(hf: HfTokenizer) -> None:
    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.integers(0, hf.vocab_size - 1), max_size=80))
    def holds(ids: list[int]) -> None:
        assert "".join(streamed(hf, ids)) == hf.decode(ids)

    holds()


def test_the_window_stays_short_whatever_comes() -> None:
    class Counting(ByteTokenizer):
        longest = 0

        def decode(self, token_ids: Sequence[int], *, specials: bool = False) -> str:
            self.longest = max(self.longest, len(token_ids))
            return super().decode(token_ids)

    for ids in (list("ab\u20ac\U0001f6a1".encode()) * 200, [0x82] * 900, [0xF0] * 900, [257] * 900):
        tokenizer = Counting()
        streamed(tokenizer, ids)
        assert tokenizer.longest < 30


def test_a_model_ends_at_its_own_and_its_generation_settings_tokens(hf: HfTokenizer) -> None:
    end, own = hf.encode("<|end|>"), hf.encode("</s>")
    assert hf.eos_token_ids == {*end, *own}
    assert hf.decode([*hf.encode("he"), *own]) == "he"
    assert set(end + own) <= hf.special_ids | hf.eos_token_ids


def test_token_bytes_join_to_the_text_with_special_tokens_by_name(hf: HfTokenizer) -> None:
    @given(st.lists(st.integers(0, hf.vocab_size - 1), max_size=40))
    def holds(ids: list[int]) -> None:
        joined = b"".join(map(hf.token_bytes, ids)).decode(errors="replace")
        assert joined == hf.decode(ids, specials=True)

    holds()
    assert hf.token_bytes(hf.encode("h\u00e9")[1]) == "\u00e9".encode()[:1]
    assert hf.decode(hf.encode("he</s>ll"), specials=True) == "he</s>ll"
    assert hf.token_bytes(hf.vocab_size + 5) == b""


def test_pieces_of_a_sentencepiece_vocabulary_are_bytes_and_spaces(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    names = ["<unk>", "\u2581the", "<0xE6>", "er", "</s>"]
    backend = Backend(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
    tokenizer = HfTokenizer(tmp_path)
    assert [tokenizer.token_bytes(i) for i in (1, 2, 3, 4)] == [b" the", b"\xe6", b"er", b"</s>"]


def test_ids_beyond_the_models_embeddings_are_not_in_its_vocabulary(folder: Path) -> None:
    assert HfTokenizer(folder, 100).vocab_size == 100
    assert HfTokenizer(folder, 10**6).vocab_size == HfTokenizer(folder).vocab_size


CHATS = st.lists(
    st.lists(
        st.one_of(st.text("h<|en/s>l", max_size=8), st.sampled_from(["</s>", "<|end|>", "<s>"])),
        max_size=5,
    ).map("".join),
    min_size=1,
    max_size=3,
)


def test_message_content_forges_no_turn_and_changes_no_other_token(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<s>{{ m.role }}h{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant{% endif %}"
    )
    tokenizer = HfTokenizer(tmp_path)
    control = {i: name for name in ("<s>", "</s>", "<|end|>") for i in tokenizer.encode(name)}

    @given(CHATS)
    def holds(contents: list[str]) -> None:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": c} for c in contents])
        turns = [control[i] for i in ids if i in control]
        assert turns == ["<s>", "<|end|>"] * len(contents) + ["<s>"]
        text = "".join(f"<s>userh{c}<|end|>" for c in contents) + "<s>assistant"
        assert tokenizer.decode(ids, specials=True) == text, "the model reads what was written"
        if not any(name in content for content in contents for name in control.values()):
            assert ids == tokenizer.encode(text)

    holds()


def test_chat_without_a_template_is_refused_with_a_way_out(hf: HfTokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template; send a prompt to"):
        hf.apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_template_that_refuses_speaks_in_its_own_words(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only users') }}"
        "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}</s>{% endif %}"
    )
    tokenizer = HfTokenizer(tmp_path)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hell"}])
    assert ids == tokenizer.encode("hell</s>")
    with pytest.raises(ChatTemplateError, match="only users"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}])
