"""Two policies whose base models like different arms agree on one only if they train together."""

from tests.bench import coordination


def test_policies_that_train_together_agree_where_those_that_train_alone_do_not() -> None:
    seed = 1
    assert coordination.together(seed) > 0.95
    assert coordination.alone(seed) < 0.05
