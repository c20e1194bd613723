from __future__ import annotations

import pytest

from turbopump.errors import InvalidArgument
from turbopump.filters.tags import EVERYTHING, parse_tags, wanted_tags
from vectors import Vector, load

EXPRESSIONS = load("codecs.json")["tagExpressions"]


@pytest.mark.parametrize("vector", EXPRESSIONS)
def test_expressions_are_parsed_as_in_apache_rocketmq(vector: Vector) -> None:
    if "error" in vector:
        with pytest.raises(InvalidArgument, match="has no tag"):
            parse_tags(vector["expression"])
        return
    found = parse_tags(vector["expression"])
    assert sorted(found.tags) == sorted(vector["tags"])
    assert sorted(found.codes) == sorted(vector["codes"])
    assert found.everything == (vector["subString"] == EVERYTHING)


def test_the_order_of_the_expression_is_preserved() -> None:
    assert parse_tags("b || a").tags == ("b", "a")


@pytest.mark.parametrize("expression", [" ", "\t", "||", "|| ||", " || ", "||||"])
def test_an_expression_without_a_tag_is_rejected_with_a_hint(expression: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        wanted_tags(expression, "option tags")
    assert str(raised.value) == (
        f"option tags is {expression!r}, which has no tag: write tags such as "
        "'created || paid', or '*' for every message"
    )


@pytest.mark.parametrize("expression", [" * ", "*||", "* || *", "* || a", "a || *", "a*", "*.a"])
def test_a_star_that_would_be_a_tag_is_rejected(expression: str) -> None:
    with pytest.raises(
        InvalidArgument, match=r"asks for a tag named '.*\*.*', since \* has a meaning"
    ):
        wanted_tags(expression, "option tags")


@pytest.mark.parametrize("expression", [7, 0, False, ["created"], b"created"])
def test_values_that_are_not_text_are_rejected(expression: object) -> None:
    with pytest.raises(InvalidArgument, match=r"option tags is .*: write tags such as"):
        wanted_tags(expression, "option tags")


@pytest.mark.parametrize(
    ("expression", "tag", "instead"),
    [
        ("a, b", "a, b", "a || b"),
        ("a | b", "a | b", "a || b"),
        ("a b,c", "a b,c", "a b || c"),
        ("a;b || c", "a;b", "a || b || c"),
        ("a && b", "a && b", "a || b"),
        ("a & b", "a & b", "a || b"),
        ("'a' || 'b'", "'a'", "a || b"),
        ("(a || b)", "(a", "a || b"),
        ('["a", "b"]', '["a", "b"]', "a || b"),
        ("|", "|", None),
    ],
)
def test_tags_joined_by_something_else_are_rejected_with_the_right_form(
    expression: str, tag: str, instead: str | None
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        wanted_tags(expression, "option tags")
    meant = "tags such as 'created || paid', or '*' for every message"
    assert str(raised.value) == (
        f"option tags is {expression!r}, which asks for a tag named {tag!r}: "
        f"write {repr(instead) if instead else meant};"
        f" if a tag has that name, write {expression + ' ||'!r}"
    )


def test_two_bars_at_the_end_ask_for_a_tag_with_a_separator() -> None:
    assert wanted_tags("a, b ||", "option tags").tags == ("a, b",)


@pytest.mark.parametrize("expression", ["*", "", None, "a || b", " a", "a||", "a&b", "a* ||"])
def test_any_other_expression_is_accepted_as_in_apache_rocketmq(expression: str | None) -> None:
    assert wanted_tags(expression, "option tags") == parse_tags(expression)
