"""Token buckets of clients: what is let in, what is owed, who is remembered."""

from __future__ import annotations

import pytest

from homeserve.errors import RateLimited
from homeserve.server.rate_limits import RateLimiter, duration, household, is_limited


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refusal(limiter: RateLimiter, client: str) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        limiter.admit(client)
    return caught.value


def test_a_minutes_worth_at_once_and_then_evenly(clock: Clock) -> None:
    limiter = RateLimiter(6, 0, clock)
    for _ in range(6):
        limiter.admit("a")
    error = refusal(limiter, "a")
    assert (error.status, error.code, error.limit, error.retry_after_s) == (429, "rate_limited", "requests", 10)
    assert "6 requests a minute (--rate-limit-requests)" in error.message
    clock.now += 9.9
    refusal(limiter, "a")
    clock.now += 0.2
    limiter.admit("a")
    refusal(limiter, "a")
    assert limiter.refused == {"requests": 3, "tokens": 0}


def test_a_refusal_costs_nothing_and_others_are_not_concerned(clock: Clock) -> None:
    limiter = RateLimiter(1, 0, clock)
    limiter.admit("a")
    for _ in range(100):
        refusal(limiter, "a")
    limiter.admit("b")
    clock.now += 60
    limiter.admit("a")


def test_tokens_are_taken_at_the_end_and_what_is_owed_is_waited_for(clock: Clock) -> None:
    limiter = RateLimiter(0, 600, clock)
    limiter.admit("a")
    limiter.charge("a", 1800)  # 1200 owed: two minutes
    error = refusal(limiter, "a")
    assert error.limit == "tokens" and 120 <= error.retry_after_s <= 121
    clock.now += error.retry_after_s
    limiter.admit("a")
    assert limiter.standing("a").requests is None


def test_a_bucket_never_holds_more_than_a_minutes_worth(clock: Clock) -> None:
    limiter = RateLimiter(2, 100, clock)
    assert limiter.standing("a").tokens is not None
    clock.now += 1e6
    limiter.admit("a")
    limiter.charge("a", 30)
    assert limiter.standing("a").headers() == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "30s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "70",
        "x-ratelimit-reset-tokens": "18s",
    }


def test_in_the_long_run_a_client_has_its_tokens_a_minute(clock: Clock) -> None:
    """However long its answers are: an hour of requests as fast as they are let in."""
    limiter = RateLimiter(0, 1000, clock)
    begin, used = clock.now, 0
    while clock.now < begin + 3600:
        try:
            limiter.admit("a")
        except RateLimited as error:
            clock.now += error.retry_after_s
        else:
            limiter.charge("a", 2500)
            used += 2500
    assert 60 * 1000 <= used <= 61 * 1000 + 2500


def test_the_clients_seen_last_are_remembered(clock: Clock) -> None:
    limiter = RateLimiter(1, 0, clock, clients=2)
    limiter.admit("a")
    limiter.admit("b")
    refusal(limiter, "a")
    limiter.admit("c")  # b is forgotten, not a
    assert len(limiter) == 2
    refusal(limiter, "a")
    limiter.admit("b")


def test_without_limits_there_are_none(clock: Clock) -> None:
    assert not RateLimiter(0, 0, clock)
    assert RateLimiter(0, 1, clock) and RateLimiter(1, 0, clock)


@pytest.mark.parametrize(
    ("address", "whose"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:aaaa::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:bbbb::2", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", "::ffff:192.0.2.7"),
        ("", ""),
    ],
)
def test_all_addresses_of_a_household_are_one_client(address: str, whose: str) -> None:
    assert household(address) == whose


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0ms"), (0.0204, "21ms"), (1.04, "1.1s"), (90, "1m30s"), (360, "6m0s"), (3661, "1h1m1s")]
)
def test_durations_are_written_as_openais_api_does(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("method", "path", "counts"),
    [
        ("POST", "/v1/chat/completions", True),
        ("POST", "/v1/messages/count_tokens", True),
        ("POST", "/tokenize", True),
        ("GET", "/v1/models", False),
        ("GET", "/metrics", False),
        ("POST", "/v1/homeserve/flip", False),
    ],
)
def test_what_computes_counts(method: str, path: str, counts: bool) -> None:
    assert is_limited(method, path) is counts
