from __future__ import annotations

from pathlib import Path

import pytest

from chairlift_bench.prompts import PromptBook


@pytest.fixture
def book(tmp_path: Path) -> PromptBook:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/b.md", "docs/a.md"):
        words = "\n\n".join(f"Paragraph {i} of {name}: " + "word " * 40 for i in range(10))
        (tmp_path / name).write_text(words)
    return PromptBook.load(repository=tmp_path)


@pytest.mark.parametrize("wanted_tokens", [80, 155, 400, 1000, 3000])
@pytest.mark.parametrize("chars_per_token", [1.0, 3.7, 4.5])
def test_a_long_prompt_has_the_wanted_length(
    book: PromptBook, wanted_tokens: int, chars_per_token: float
) -> None:
    for seed in range(20):
        prompt = book.prompt(wanted_tokens, seed, chars_per_token)
        if "passage from a manual" in prompt:
            assert abs(len(prompt) / chars_per_token - wanted_tokens) < 4
        else:
            assert prompt in book.questions


def test_prompts_repeat_by_seed_and_differ_between_seeds(book: PromptBook) -> None:
    prompts = [book.prompt(300, seed, 4.0) for seed in range(50)]
    assert prompts == [book.prompt(300, seed, 4.0) for seed in range(50)]
    assert len(set(prompts)) > 40


def test_a_short_prompt_is_a_question_as_people_ask_it(book: PromptBook) -> None:
    asked = {book.prompt(12, seed, 4.0) for seed in range(300)}
    assert asked <= set(book.questions)
    assert len(asked) > 50 and len(set(book.questions)) == len(book.questions) >= 60


def test_without_docs_every_prompt_is_still_a_question(tmp_path: Path) -> None:
    book = PromptBook.load(repository=tmp_path)
    assert book.prompt(500, 1, 4.0) in book.questions
    assert book.sample()
