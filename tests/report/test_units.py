"""Amounts of memory are read as people write them, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematplan.errors import InputError
from rematplan.units import format_bytes, format_bytes_up, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12GiB", 12 * 2**30),
        ("12GB", 12 * 10**9),
        ("600MiB", 600 * 2**20),
        ("600 mib", 600 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("1_000", 1000),
        ("1_000KiB", 1_024_000),
        (123, 123),
        ("9007199254740993", 2**53 + 1),
        ("1e9", 10**9),
    ],
)
def test_reads_bytes(text, expected):
    assert parse_bytes(text) == expected


def test_percent_is_of_the_given_memory():
    assert parse_bytes("80%", of=1000) == 800
    with pytest.raises(InputError, match="no such figure"):
        parse_bytes("80%")
    with pytest.raises(InputError, match="more than all"):
        parse_bytes("120%", of=1000)


@pytest.mark.parametrize(
    "text", ["", "GiB", "12G", "12 parsecs", "1,000", "0", 0, "0GiB", "0.4", -1, "-3GiB", "0%", True, None, 1.5]
)
def test_refuses_what_is_not_a_positive_amount(text):
    with pytest.raises(InputError):
        parse_bytes(text, of=100)


@given(st.integers(min_value=1, max_value=2**50))
def test_a_minimum_typed_back_in_suffices(count):
    assert count <= parse_bytes(format_bytes_up(count)) <= count + 2**20


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_bytes(1_643_000_000), "1.53 GiB"),
        (format_bytes(562 * 2**20), "562 MiB"),
        (format_bytes(1000 * 2**20), "1000 MiB"),
        (format_bytes(17), "17 B"),
        (format_seconds(0.0236), "23.6 ms"),
        (format_seconds(125), "2 min 05 s"),
        (format_seconds(0), "0 s"),
        (format_count(35.4e6), "35.4 M"),
        (format_count(17), "17"),
    ],
)
def test_formats(shown, expected):
    assert shown == expected
