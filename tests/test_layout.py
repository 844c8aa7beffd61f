"""The tree's own rules: `operator/` must never shadow the standard library's module."""

from __future__ import annotations

import operator
import pathlib
import sys
import sysconfig
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
ROOTS = ("protocol", "engine", "gateway", "operator", "simulation", "cli", "bench")


def test_source_roots_hold_only_their_package() -> None:
    assert [p for root in ROOTS for p in (ROOT / root).glob("*.py")] == []
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_operator_is_the_standard_module() -> None:
    assert pathlib.Path(operator.__file__).parent == pathlib.Path(sysconfig.get_path("stdlib"))


def test_no_module_borrows_a_standard_name() -> None:
    stems = {p.stem for root in ROOTS for p in (ROOT / root).rglob("*.py")}
    assert stems & set(sys.stdlib_module_names) == set()


def test_every_package_of_the_tree_is_packed_and_typed() -> None:
    """Hatchling says nothing about a mistyped entry; mypy refuses an installed untyped package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(packed) == sorted(f"{root}/chairlift_{root}" for root in ROOTS)
    assert [p for p in packed if not (ROOT / p / "py.typed").exists()] == []
