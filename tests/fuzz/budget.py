"""How much each fuzz test tries: a little and always the same in `make test`, much and always new in `make fuzz`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

PROFILE = "fuzz"  # of `make fuzz`, which passes --hypothesis-profile
FACTOR = 10  # between the two
SECONDS_GUIDED = 60  # of the coverage-guided target, which runs in `make fuzz` alone

_DEFAULT_EXAMPLES = settings.get_profile("default").max_examples

settings.register_profile(
    PROFILE,
    max_examples=_DEFAULT_EXAMPLES * FACTOR,
    derandomize=False,
    deadline=None,
    database=None,
    print_blob=True,
)


def num_examples(in_tests: int) -> int:
    """Scale the number of examples that `make test` runs to the profile in force."""
    return in_tests * settings().max_examples // _DEFAULT_EXAMPLES


def examples(in_tests: int) -> settings:
    """Return the settings of a test that tries so many examples in `make test`."""
    quiet = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
    return settings(max_examples=num_examples(in_tests), suppress_health_check=quiet)
