"""Refused connections are logged a few times and then counted; the host with the most gives way first."""

from telegrad._core.security.handshake import MOST_HOSTS, MOST_LINES, OTHERS, PERIOD, Refusals, host_of, to_give_way


def test_a_host_gets_a_few_log_lines_per_period_and_a_count() -> None:
    refusals = Refusals()
    assert [refusals.should_log("h", 1.0) for _ in range(100)] == [True] * MOST_LINES + [False] * (100 - MOST_LINES)
    assert refusals.should_log("another", 1.0)
    assert (refusals.left_out(1.0 + PERIOD / 2), refusals.left_out(1.0 + PERIOD)) == ([], [("h", 100 - MOST_LINES)])
    assert refusals.should_log("h", 2.0 + PERIOD)
    assert refusals.left_out(1.0 + 2 * PERIOD) == []


def test_hosts_above_the_limit_are_counted_together() -> None:
    refusals = Refusals()
    assert sum(refusals.should_log(f"h{number}", 1.0) for number in range(10 * MOST_HOSTS)) == MOST_HOSTS + MOST_LINES
    assert refusals.left_out(1.0 + PERIOD) == [(OTHERS, 9 * MOST_HOSTS - MOST_LINES)]
    assert not refusals._since


def test_the_host_with_the_most_connections_gives_way() -> None:
    assert host_of("1.2.3.4:5") == "1.2.3.4"
    assert host_of("::1:5") == "::1"
    assert host_of("this host") == "this host"
    assert to_give_way(["a:1", "b:1", "b:2", "c:1", "b:3"]) == 1
    assert to_give_way(["this host", "a:1", "a:2"]) == 1
    assert to_give_way(["a:1"]) == 0
