"""The figures of a benchmark are told rightly."""

from __future__ import annotations

from benchmarks.report import Result, number, spread, table, verdict

TIME = Result("call", "host", "µs", False, [10.0, 30.0, 20.0], [100.0, 80.0, 90.0])
RATE = Result("rate", "tcp", "GB/s", True, [1.0, 3.0, 2.0], [4.0, 4.0, 4.0])


def test_verdicts():
    assert verdict(TIME) == "0.22 (4.5 times better)"
    assert verdict(RATE) == "0.50 (2.0 times worse)"


def test_numbers():
    assert [number(x) for x in (1234.5, 12.34, 1.234)] == ["1,234", "12.3", "1.23"]
    assert spread(TIME.ours) == "20.0 (10.0 to 30.0)"


def test_tables():
    text = table([TIME, RATE], [("copy", "GB/s", 9.0)])
    assert "| call | host | µs | 20.0 (10.0 to 30.0) | 90.0 (80.0 to 100) | 0.22 (4.5 times better) |" in text
    assert text.endswith("| copy | GB/s | 9.00 |\n")
