"""YAML text to plain values, or a `NotYaml` that says where and why: whatever the text holds.

Knows nothing of what the values mean. Called by `spec_parsing` for files and for single settings.
"""

from __future__ import annotations

from typing import Any

import yaml
from yaml.reader import ReaderError


class NotYaml(ValueError):
    """`where` is empty, or names line and column in front of the sentence."""

    def __init__(self, problem: str, where: str = "") -> None:
        super().__init__(problem)
        self.where = where


def read_yaml(text: str) -> list[Any]:
    """Every document of the text."""
    try:
        # A SafeLoader by inheritance: constructs no Python objects.
        return list(yaml.load_all(text, _StrictLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = _where(mark.line, mark.column) if mark else ""
        raise NotYaml(str(error.problem or error.context), where) from None
    except ReaderError as error:
        before = text[: error.position]
        column = len(before) - (before.rfind("\n") + 1)
        problem = f"the character {chr(int(error.character))!r} is not allowed"
        raise NotYaml(problem, _where(before.count("\n"), column)) from None
    except RecursionError:
        raise NotYaml("it is nested too deeply") from None


def _where(line: int, column: int) -> str:
    return f"line {line + 1}, column {column + 1}: "


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key given twice, where YAML would silently keep the last, and names the place of a
    scalar that its constructors choke on."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            shown = node.value if isinstance(node, yaml.ScalarNode) else "this"
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown!r} cannot be read as {kind}", node.start_mark
            ) from None


def _construct_unique(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        problem = None
        if not isinstance(key_node, yaml.ScalarNode):
            problem = "a key must be a name, not a list or an object"
        elif key_node.value in seen:
            problem = f"{key_node.value!r} is given twice"
        if problem:
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen.add(key_node.value)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_unique)
