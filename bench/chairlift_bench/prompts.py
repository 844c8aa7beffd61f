"""Prompts of wanted lengths: short questions as people ask them, long ones about project docs.

All text is the project's own. Knows nothing of servers: lengths are estimated from characters per
token, which the caller measures with the model's tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

REPOSITORY: Final = Path(__file__).parents[2]
PROMPTS: Final = Path(__file__).parents[1] / "prompts"
SHORTEST_PASSAGE_TOKENS: Final = 24
LEAD: Final = "Here is a passage from a manual.\n\n"


@dataclass(frozen=True, slots=True)
class PromptBook:
    """Words to make prompts of. paragraphs: the docs, in order; long prompts are runs of them."""

    questions: Sequence[str]
    passage_questions: Sequence[str]
    paragraphs: Sequence[str]

    @classmethod
    def load(cls, repository: Path = REPOSITORY, prompts: Path = PROMPTS) -> Self:
        pages = [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]
        return cls(
            questions=_lines(prompts / "questions.txt"),
            passage_questions=_lines(prompts / "passage_questions.txt"),
            paragraphs=[text for page in pages if page.exists() for text in _paragraphs(page)],
        )

    def prompt(self, wanted_tokens: int, seed: int, chars_per_token: float) -> str:
        """About wanted_tokens long, but never less than a question; the same for the same seed."""
        draw = random.Random(seed)
        question = draw.choice(self.passage_questions)
        num_passage_chars = int(wanted_tokens * chars_per_token) - len(LEAD) - len(question)
        if not self.paragraphs or num_passage_chars < SHORTEST_PASSAGE_TOKENS * chars_per_token:
            return draw.choice(self.questions)
        passage = self._passage(draw.randrange(len(self.paragraphs)), num_passage_chars)
        return f"{LEAD}{passage}\n\n{question}"

    def sample(self, num_chars: int = 4000) -> str:
        """Text to measure characters per token with."""
        return self._passage(0, num_chars) if self.paragraphs else "\n".join(self.questions)

    def _passage(self, first: int, num_chars: int) -> str:
        """Paragraphs from `first` on, from the start again after the last, cut at num_chars."""
        parts: list[str] = []
        missing = num_chars
        at = first
        while missing > 0:
            parts.append(self.paragraphs[at % len(self.paragraphs)])
            missing -= len(parts[-1]) + 2
            at += 1
        return "\n\n".join(parts)[:num_chars]


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line]


def _paragraphs(page: Path) -> list[str]:
    parts = page.read_text(encoding="utf-8").split("\n\n")
    return [part.strip() for part in parts if part.strip()]
