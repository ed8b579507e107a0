"""The rule of recommendation: by hand, and by simulated searches of settings whose truth is known.

`python -m tests.answers.test_choice` prints what docs/numbers.md says of more of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from bench.answers.choice import Candidate, Choice, choose_among
from bench.base.limits import NEAR

SEED = 20261129

TRUTHS: dict[str, Mapping[int, float]] = {
    # the geometric means of results/advice-epyc-20261129, of which its repeats spread by 6 %
    "four within 9 %": {256: 82.7, 128: 87.2, 64: 90.07, 32: 89.86},
    "four within 12 %": {256: 82.7, 128: 86.0, 64: 89.3, 32: 92.6},
    "three are 12 % slower": {256: 80.0, 128: 89.6, 64: 89.6, 32: 89.6},
    "one is 25 % slower": {256: 80.0, 128: 82.0, 64: 84.0, 32: 100.0},
}
"""Epoch times by batch size, in s."""


def choose(times: Mapping[int, Sequence[float]], present: int | None = None) -> Choice[int]:
    return choose_among([Candidate(n, readings, n) for n, readings in times.items()], present)


def simulate(
    truth: Mapping[int, float], noise: float, repeats: int, present: int | None, searches: int
) -> list[Choice[int]]:
    rng = np.random.default_rng(SEED)
    shape = (searches, len(truth), repeats)
    times = np.array([*truth.values()])[:, None] * np.exp(noise * rng.standard_normal(shape))
    return [choose(dict(zip(truth, of, strict=True)), present) for of in times.tolist()]


def rate_wrong(truth: Mapping[int, float], found: Sequence[Choice[int]]) -> float:
    most = (1 + NEAR) * min(truth.values())
    return float(np.mean([truth[choice.chosen] > most for choice in found]))


def rate_agreement(found: Sequence[Choice[int]]) -> tuple[float, float]:
    """Return the shares of pairs of searches that choose the same, and in which each says of what
    the other chooses at least that it cannot tell it from its own."""
    pairs = [*zip(found[::2], found[1::2], strict=True)]
    equals = [[{one.chosen, *one.near, *one.open} for one in pair] for pair in pairs]
    same = [a.chosen == b.chosen for a, b in pairs]
    known = [a.chosen in of_b and b.chosen in of_a
             for (a, b), (of_a, of_b) in zip(pairs, equals, strict=True)]  # fmt: skip
    return float(np.mean(same)), float(np.mean(known))


@pytest.mark.parametrize(
    ("name", "noise"),
    [
        ("four within 9 %", 0.06),
        ("four within 12 %", 0.02),
        ("four within 12 %", 0.06),
        ("three are 12 % slower", 0.02),
        ("one is 25 % slower", 0.06),
    ],
)
def test_what_is_truly_more_than_a_tenth_slower_is_seldom_chosen(name: str, noise: float) -> None:
    """And where two searches choose differently, each says that it cannot tell."""
    found = simulate(TRUTHS[name], noise, 3, None, 300)
    assert rate_wrong(TRUTHS[name], found) <= 0.025
    assert rate_agreement(found)[1] >= 0.98


def test_two_searches_keep_the_batch_size_in_use() -> None:
    found = simulate(TRUTHS["four within 9 %"], 0.06, 3, 128, 200)
    assert rate_agreement(found)[0] >= 0.98
    # one that truly takes a quarter longer is left as soon as repeats show it
    slower = simulate(TRUTHS["one is 25 % slower"], 0.01, 3, 32, 100)
    assert Counter(choice.chosen for choice in slower)[32] <= 1


def test_a_single_run_is_judged_by_the_noise_of_what_was_repeated() -> None:
    """1.08 times as long is near where repeats agree, and open where they do not."""
    steady = {512: [100.0], 256: [108.0], 1024: [150.0, 150.3, 149.8, 150.1]}
    assert choose(steady).chosen == 256
    choice = choose({**steady, 1024: [150.0, 160.0, 145.0, 155.0]})
    assert (choice.chosen, choice.open) == (512, (256,))


def test_without_any_repeat_times_are_known_within_2_percent() -> None:
    assert choose({512: [100.0], 256: [107.0]}).chosen == 256
    assert choose({512: [100.0], 256: [109.0]}).chosen == 512
    assert choose({512: [100.0], 256: [109.0]}, present=256).chosen == 256
    assert choose({512: [100.0], 256: [113.0]}, present=256).chosen == 512


def test_copies_of_a_run_tell_no_more_than_it_does() -> None:
    """Their times are equal to the last digit, so that they do not show how far others differ."""
    for repeats in (1, 3):
        choice = choose({256: [80.0] * repeats, 64: [80.0 * 1.09] * repeats})
        assert (choice.chosen, choice.open) == (256, (64,))


def test_of_settings_alike_the_least_unusual_is_chosen() -> None:
    def choose_recipe(time: float) -> str:
        own = Candidate("recipe", [100.0], 64, (True, 0))
        return choose_among([own, Candidate("autocast", [time], 64, (False, 2))]).chosen

    assert choose_recipe(101.5) == "autocast"
    assert choose_recipe(105.0) == "recipe"


if __name__ == "__main__":
    for title, truth in TRUTHS.items():
        for spread in (0.003, 0.02, 0.06):
            for now in (None, 128):
                searches = simulate(truth, spread, 3, now, 4000)
                chosen = Counter(choice.chosen for choice in searches)
                shares = ", ".join(f"{n} {c / 40:.0f} %" for n, c in chosen.most_common())
                wrong, (same, known) = rate_wrong(truth, searches), rate_agreement(searches)
                print(
                    f"{title}; noise {spread:.1%}; in use {now}: wrong {wrong:.1%}, same "
                    f"{same:.0%}, or said {known:.1%}; {shares}"
                )
