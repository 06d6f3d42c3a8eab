"""Casts and sums of 16-bit numbers, in one process."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from chainermn.transport.host.arithmetic import Adder, divide

pytestmark = pytest.mark.each_mpi

ALL_HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def narrow(source: np.ndarray) -> np.ndarray:
    out = np.empty(source.size, np.float16)
    Adder().copy(source, out)
    return out


def check_against_numpy(source: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        expected = source.astype(np.float16)
    actual = narrow(source)
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), is_nan)
    np.testing.assert_array_equal(actual.view("u2")[~is_nan], expected.view("u2")[~is_nan])


def test_every_half_becomes_float32() -> None:
    out = np.empty(ALL_HALVES.size, np.float32)
    Adder().copy(ALL_HALVES, out)
    expected = ALL_HALVES.astype(np.float32)
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(out.view("u4")[is_number], expected.view("u4")[is_number])
    assert np.isnan(out[~is_number]).all()


def test_float32_at_and_around_every_half_and_every_tie() -> None:
    halves = ALL_HALVES[np.isfinite(ALL_HALVES)].astype(np.float32)
    ties = (halves[:-1] + halves[1:]) / 2
    for numbers in (halves, ties, np.array([65504, 65519.996, 65520, -65520, 65536], "f")):
        check_against_numpy(numbers)
        for direction in (-np.inf, np.inf):
            check_against_numpy(np.nextafter(numbers, np.float32(direction)))


def test_float32_of_any_bits() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    numbers = bits.view(np.float32)
    check_against_numpy(numbers)  # with a NaN in every block
    check_against_numpy(numbers[~np.isnan(numbers)])


@pytest.mark.parametrize("n", [0, 1, 3, (1 << 15) - 1, (1 << 15) + 1])
def test_lengths(n: int) -> None:
    numbers = np.random.default_rng(n).normal(size=n).astype(np.float32)
    check_against_numpy(numbers)
    check_against_numpy(numbers.astype(np.float64))


def test_overflow_is_remembered() -> None:
    adder, out = Adder(), np.empty(4, np.float16)
    adder.copy(np.array([65519, np.inf, -np.inf, 1], "f"), out)
    assert adder.overflow == 0
    adder.copy(np.array([-65536, np.inf, 65520, np.nan], "f"), out)
    assert adder.overflow == 65536
    adder.copy(np.array([0, 1e30, 65520, 0], np.float64), out)
    assert adder.overflow == 1e30


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("n_parts", [2, 64])
def test_error_does_not_grow_with_the_number_of_summands(dtype: type, n_parts: int) -> None:
    generator = np.random.default_rng(1)
    parts = [generator.normal(1, 0.1, 40000).astype(dtype) for _ in range(n_parts)]
    mean = np.empty(40000, dtype)
    Adder().add_up(parts, mean, divisor=n_parts)
    expected = np.mean([part.astype(np.float64) for part in parts], axis=0)
    half_a_step = float(ml_dtypes.finfo(dtype).eps) / 2  # of numbers between 1 and 2
    assert np.abs(mean.astype(np.float64) - expected).max() <= half_a_step * 1.01


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("divisor", [1, 2, 3, 64])
def test_dividing_rounds_once(dtype: str, divisor: int) -> None:
    numbers = np.random.default_rng(2).normal(size=1000).astype(dtype)
    numbers[:2] = np.finfo(dtype).smallest_subnormal * 3
    quotients = numbers.copy()
    divide(quotients, divisor)
    np.testing.assert_array_equal(quotients, numbers / np.array(divisor, dtype))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("n_rows", [1, 2, 3, 8, 63, 200])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 8, 31, 341])
def test_rows_are_added_up_in_their_order(dtype: str, n_rows: int, n: int) -> None:
    random = np.random.default_rng([n_rows, n])
    scales = 10.0 ** random.integers(-2, 2, size=(n_rows, 1))
    rows = (random.normal(size=(n_rows, n + 3)) * scales).astype(dtype)[:, :n]
    first, second, one_by_one, at_once = random.normal(size=(4, n)).astype(dtype)
    Adder().add_up([first, second, *rows[1:].copy()], one_by_one, 3)
    Adder().add_up_rows(first, second, rows, at_once, 3)
    np.testing.assert_array_equal(at_once, one_by_one)
