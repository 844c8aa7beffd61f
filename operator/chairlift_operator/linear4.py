"""Arithmetic on four-vectors and 4×4 matrices as tuples: just what the step-time model needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Vector = tuple[float, float, float, float]
Matrix = tuple[Vector, Vector, Vector, Vector]


def vector(values: Iterable[float]) -> Vector:
    a, b, c, d = values
    return a, b, c, d


def dot(left: Vector, right: Vector) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))


def times(matrix: Matrix, column: Vector) -> Vector:
    return vector(dot(row, column) for row in matrix)


def scale(values: Vector, factor: float) -> Vector:
    return vector(value * factor for value in values)


def add(left: Vector, right: Vector) -> Vector:
    return vector(x + y for x, y in zip(left, right, strict=True))


def diagonal(values: Vector) -> Matrix:
    rows = [vector(v if i == j else 0.0 for j in range(4)) for i, v in enumerate(values)]
    return rows[0], rows[1], rows[2], rows[3]


def plus(left: Matrix, right: Matrix) -> Matrix:
    rows = [add(x, y) for x, y in zip(left, right, strict=True)]
    return rows[0], rows[1], rows[2], rows[3]


def minus_outer(matrix: Matrix, column: Vector, row: Vector) -> Matrix:
    """matrix - column·rowᵀ, made symmetric again after rounding."""
    raw = [[matrix[i][j] - column[i] * row[j] for j in range(4)] for i in range(4)]
    return _symmetric(raw)


def _symmetric(raw: Sequence[Sequence[float]]) -> Matrix:
    rows = [vector((raw[i][j] + raw[j][i]) / 2 for j in range(4)) for i in range(4)]
    return rows[0], rows[1], rows[2], rows[3]
