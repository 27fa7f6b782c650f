import pytest

from outrider.cluster.common.option_values import typed_value


def test_a_value_becomes_its_type_and_so_does_the_json_of_one():
    assert typed_value("n", "3", int) == 3
    assert typed_value("taps", [1, 2], tuple[int, ...]) == (1, 2)
    assert typed_value("labels", '{"a": "b"}', dict[str, str], is_json=True) == {"a": "b"}


@pytest.mark.parametrize(("value", "is_json"), [("secret", False), ("{secret", True)])
def test_an_error_names_the_key_and_not_the_value(value: str, is_json: bool):
    with pytest.raises(ValueError, match=r"^port: ") as error:
        typed_value("port", value, int, is_json=is_json)
    assert "secret" not in str(error.value)
