"""quantize_symmetric and dequantize_symmetric against the definition."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

import oracle
import pagedkv

MODES = ["q8", "q6", "q4"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("d", [4, 8, 64, 100, 128, 256])
def test_bytes_equal_the_formula_element_by_element(mode, d):
    x = np.random.default_rng(d).standard_normal((3, 50, d), np.float32) * np.float32(10) ** np.arange(-3, 2).repeat(30).reshape(3, 50, 1)
    codes, scales = pagedkv.quantize_symmetric(x, mode)
    expected_codes, expected_scales = oracle.quantize(x, mode)
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(scales, expected_scales)
    assert codes.dtype == expected_codes.dtype and scales.dtype == np.float32
    np.testing.assert_array_equal(pagedkv.dequantize_symmetric(codes, scales, d, mode), oracle.stored(x, mode))


@pytest.mark.parametrize("mode", MODES)
@given(st.data())
def test_any_finite_row_keeps_the_formulas_bytes(mode, data):
    d = 4 * data.draw(st.integers(1, 20))
    x = np.array(data.draw(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**100,
                                              min_value=-(2.0**100)), min_size=d, max_size=d)), np.float32)
    codes, scales = pagedkv.quantize_symmetric(x, mode)
    expected_codes, expected_scales = oracle.quantize(x, mode)
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(scales, expected_scales)


@pytest.mark.parametrize("d", [1, 7, 33])
def test_the_last_element_of_an_odd_row_survives(d):  # O-NUM-09
    x = np.arange(1, d + 1, dtype=np.float32)
    codes, scales = pagedkv.quantize_symmetric(x, "q4")
    assert len(codes) == (d + 1) // 2 and codes[-1] >> 4 == 8
    assert abs(pagedkv.dequantize_symmetric(codes, scales, d, "q4")[-1] - d) <= d / 14


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_zeros_and_of_almost_nothing_stay_finite(mode):  # O-NUM-19, O-NUM-20
    x = np.zeros((4, 8), np.float32)
    x[1, 2], x[2, 3], x[3, 4] = 1e-38, -5.7e-35, 1e-45
    back = pagedkv.dequantize_symmetric(*pagedkv.quantize_symmetric(x, mode), 8, mode)
    assert np.all(back[0] == 0) and np.all(np.isfinite(back)) and np.abs(back).max() <= 1e-34


def test_what_is_no_row_of_numbers_is_refused():
    x = np.ones((2, 8), np.float32)
    for bad, error, match in (
        (lambda: pagedkv.quantize_symmetric(x, "q5"), ValueError, "q8, q6, q4"),
        (lambda: pagedkv.quantize_symmetric(x, "off"), ValueError, "not a quantized format"),
        (lambda: pagedkv.quantize_symmetric(np.ones((2, 6), np.float32), "q6"), ValueError, "6"),
        (lambda: pagedkv.quantize_symmetric(np.ones((2, 0), np.float32)), ValueError, "0 values"),
        (lambda: pagedkv.quantize_symmetric(np.ones((2, 8), int)), TypeError, "int64"),
        (lambda: pagedkv.quantize_symmetric([[1.0]]), TypeError, "list"),
        (lambda: pagedkv.quantize_symmetric(x * np.nan), pagedkv.NotFiniteError, "row 0"),
        (lambda: pagedkv.dequantize_symmetric(np.ones((2, 7), np.int8), np.ones(2, np.float32), 8), ValueError, "7 bytes"),
        (lambda: pagedkv.dequantize_symmetric(np.ones((2, 8), np.int8), np.ones(3, np.float32), 8), ValueError, "3"),
        (lambda: pagedkv.dequantize_symmetric(np.ones((2, 8)), np.ones(2, np.float32), 8), TypeError, "float64"),
    ):
        with pytest.raises(error, match=match):
            bad()


def test_no_rows_give_no_rows():
    codes, scales = pagedkv.quantize_symmetric(np.ones((0, 8), np.float32))
    assert codes.shape == (0, 8) and scales.shape == (0, 1)
