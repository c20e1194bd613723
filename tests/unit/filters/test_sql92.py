from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.errors import InvalidArgument, InvalidExpression
from turbopump.filters.sql92 import ConversionFailed, SqlFilter, compile_sql, tokens
from turbopump.filters.sql92 import tree as t
from turbopump.filters.sql92.parser import LENGTH_MAX, NESTING_MAX, parse
from vectors import case, load

GOLDEN = load("sql92.json")
CASES = GOLDEN["cases"]


def outcome(compiled: SqlFilter, properties: Mapping[str, str] | None) -> bool | str | None:
    try:
        return compiled.result(properties)
    except ConversionFailed:
        return "error"


# --- what Apache RocketMQ answered ----------------------------------------------------------------


def test_golden_trees_and_truth_tables() -> None:
    assert CASES
    for recorded in CASES:
        with case(recorded["expr"]):
            check_recorded(recorded)


def check_recorded(recorded: dict[str, Any]) -> None:
    if recorded["compile"] == "error":
        with pytest.raises(InvalidExpression):
            compile_sql(recorded["expr"])
        return
    # The smallest double has another notation there.
    tree = recorded["tree"].replace("4.9E-324", "5.0E-324")
    assert java(parse(recorded["expr"])) == sorted_texts(tree)
    compiled = compile_sql(recorded["expr"])
    for expected in recorded["evaluations"]:
        properties = GOLDEN["properties"][expected["properties"]]
        found = outcome(compiled, properties)
        assert (found, type(found)) == (expected["result"], type(expected["result"])), expected
        assert compiled.matches(properties) is expected["match"], expected


def leaf(part: t.Expression) -> str:
    """Print a part that has no parts, as expressions and recorded trees both do."""
    match part:
        case t.Property(name):
            return name
        case t.Text(value):
            return "'" + value.replace("'", "''") + "'"
        case t.Truth(value):
            return {True: "TRUE", False: "FALSE", None: "NULL"}[value]
        case _:
            raise AssertionError(part)


def java(part: t.Expression) -> str:
    """Print a tree as the recorded ones are printed."""
    match part:
        case t.Numeric(value, kind):
            return java_double(value) if kind is t.Number.DOUBLE else str(value)
        case t.Negative(operand):
            return f"(- {java(operand)})"
        case t.Not(operand):
            return f"(NOT {java(operand)})"
        case t.IsNull(operand):
            return f"({java(operand)} == NULL)"
        case t.Equal(left, right):
            return f"({java(left)} == {java(right)})"
        case t.Compare(left, order, right):
            return f"({java(left)} {order.value} {java(right)})"
        case t.In(name, texts, is_negated):
            word = "NOT IN" if is_negated else "IN"
            return f"{name} {word} ( {', '.join(sorted(texts))} )"
        case t.All(terms) | t.Any(terms):
            joined = java(terms[0])
            for term in terms[1:]:
                joined = f"({joined} {'&&' if isinstance(part, t.All) else '||'} {java(term)})"
            return joined
        case _:
            return leaf(part)


def java_double(value: float) -> str:
    if 1e-3 <= value < 1e7:
        return repr(float(value))
    digits, _, exponent = f"{value!r}".partition("e")
    if not exponent:
        scientific = f"{value:.16e}"
        digits, _, exponent = scientific.partition("e")
        digits = digits.rstrip("0")
        digits += "0" if digits.endswith(".") else ""
    digits += "" if "." in digits else ".0"
    return f"{digits}E{int(exponent)}"


def sorted_texts(tree: str) -> str:
    """Sort the texts of IN: the recorded ones are in the order of a hash table."""
    return re.sub(
        r"IN \( (.*?) \)", lambda m: f"IN ( {', '.join(sorted(m[1].split(', ')))} )", tree
    )


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "position", "reason"),
    [
        ("", 0, "expected a property name, a constant or (, found end of expression"),
        ("a =", 3, "expected a property name, a constant or (, found end of expression"),
        ("a = 5 AND", 9, "expected a property name, a constant or (, found end of expression"),
        ("(a = 5", 6, "expected ), found end of expression"),
        ("a == 5", 3, "expected a property name, a constant or (, found '='"),
        ("a != 5", 2, "'!' is not part of SQL92; for 'not equal' write <>"),
        ('a = "x"', 4, "'\"' is not part of SQL92; strings have single quotes"),
        ("a = 'x", 4, "the string has no closing quote"),
        ("a = 5 /* x", 6, "the comment has no end, */"),
        ("a IS 5", 5, "expected NULL, found '5'"),
        ("a IN (5)", 6, "expected a string in single quotes, found '5'"),
        ("a IN 'x'", 5, "expected (, found \"'x'\""),
        ("5 IN ('x')", 0, "IN expects a property name on its left side"),
        ("a BETWEEN 5 OR 6", 12, "expected AND, found 'OR'"),
        ("a BETWEEN 9 AND 1", 10, "BETWEEN 9 AND 1 matches nothing"),
        ("a NOT > 5", 6, "expected BETWEEN or IN, found '>'"),
        ("a NOT LIKE 'x'", 6, "expected BETWEEN or IN, found 'LIKE'"),
        ("a NOT", 5, "expected BETWEEN or IN, found end of expression"),
        ("a = 5 NOT", 9, "expected BETWEEN or IN, found end of expression"),
        ("a = NULL", 2, "write IS NULL or IS NOT NULL"),
        ("TRUE = 1", 5, "TRUE and FALSE equal neither numbers nor strings"),
        ("a > 'x'", 4, "only numbers and properties have an order"),
        ("(a = 5) > 1", 0, "the result of a condition has no order"),
        ("b AND 5", 6, "expected a condition such as a = 1, found only a value"),
        ("a = 9223372036854775808", 4, "integers must be at most 9223372036854775807"),
        ("a = 0.0", 4, "for zero write 0"),
    ],
)
def test_errors_say_where_and_what(expression: str, position: int, reason: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        compile_sql(expression)
    assert isinstance(raised.value, InvalidExpression)
    assert reason in raised.value.reason
    assert raised.value.position == position
    assert f"(at character {position + 1})" in str(raised.value)


@pytest.mark.parametrize(
    "expression",
    [
        "(" * 100_000,
        "(" * 5_000 + "a = 5" + ")" * 5_000,
        "NOT " * 4_000 + "a",
        "a = " + "-" * 16_000 + "5",
        "a" + " = a" * 4_000,
        "a" + " IS NULL" * 2_000,
        "((" * 45 + "a" + (" = TRUE" * 20 + ")") * 90,
        "a = " + "9" * 16_000,
        "a = 1" + "0" * 16_000 + ".0",
        "a IN ('" + "x" * LENGTH_MAX + "')",
        "a = 5" + " " * LENGTH_MAX,
    ],
    ids=lambda text: text[:12],
)
def test_deep_and_huge_expressions_are_errors(expression: str) -> None:
    with pytest.raises(InvalidExpression):
        compile_sql(expression)


@pytest.mark.parametrize("rest", ["NOT", "NOT > 5", "> 5", "garbage"])
def test_what_follows_is_null_is_ignored(rest: str) -> None:
    assert parse(f"a IS NULL {rest}") == parse("a IS NULL")


def test_what_is_just_deep_enough_works() -> None:
    level = "a = '1' OR b = '1' AND NOT d < ("
    depth = NESTING_MAX // 2 - 1
    expression = level.replace("d < (", "(") * depth + "c = '1'" + ")" * depth
    assert compile_sql(expression).matches({"a": "1"})
    assert compile_sql(" AND ".join(["a = 5"] * 1_500)).matches({"a": "5"})
    assert compile_sql(f"a IN ({', '.join(repr(str(n)) for n in range(1_500))})").matches(
        {"a": "1499"}
    )


@given(st.text("aANDORTI05.'(),<>=-+*/ \n", max_size=60))
def test_any_text_compiles_or_is_an_error(expression: str) -> None:
    try:
        compiled = compile_sql(expression)
    except InvalidExpression as error:
        assert 0 <= error.position <= len(expression)
    else:
        outcome(compiled, {"a": "5", "A": "x", "D": "TRUE"})


# --- printed, parsed again, and compared with a plain interpreter ---------------------------------

names = st.sampled_from(["a", "b", "color", "_x", "$y"])
properties = st.builds(t.Property, names)
texts = st.builds(t.Text, st.text("ab'5 ", max_size=4))
int32s = st.builds(t.Numeric, st.integers(0, 2**31 - 1), st.just(t.Number.INT32))
int64s = st.builds(t.Numeric, st.integers(2**31, 2**63 - 1), st.just(t.Number.INT64))
doubles = st.builds(
    t.Numeric,
    st.floats(min_value=1e-300, max_value=1e300, allow_subnormal=False),
    st.just(t.Number.DOUBLE),
)
numbers = int32s | int64s | doubles
ordered = properties | numbers | st.builds(t.Negative, properties | numbers)
leaves = (
    st.builds(t.Equal, properties, texts | numbers | properties | st.just(t.Truth(True)))
    | st.builds(t.Equal, numbers, properties)
    | st.builds(t.Compare, ordered, st.sampled_from(t.Order), ordered)
    | st.builds(t.IsNull, properties)
    | st.builds(t.In, names, st.frozensets(st.text("ab5'", max_size=3), min_size=1), st.booleans())
    | st.sampled_from([t.Truth(True), t.Truth(False), t.Truth(None)])
    | properties
)


def joined(inside: st.SearchStrategy[t.Expression]) -> st.SearchStrategy[t.Expression]:
    terms = st.lists(inside, min_size=2, max_size=3).map(tuple)
    return st.builds(t.All, terms) | st.builds(t.Any, terms) | st.builds(t.Not, inside)


conditions = st.recursive(leaves, joined, max_leaves=8)


def sql(part: t.Expression) -> str:
    match part:
        case t.Numeric(value):
            return repr(value)
        case t.Negative(operand):
            return f"-{sql(operand)}"
        case t.Not(operand):
            return f"NOT ({sql(operand)})"
        case t.IsNull(operand):
            return f"({sql(operand)}) IS NULL"
        case t.Equal(left, right):
            return f"({sql(left)}) = ({sql(right)})"
        case t.Compare(left, order, right):
            return f"{sql(left)} {order.value} {sql(right)}"
        case t.In(name, texts, is_negated):
            listed = ", ".join(sql(t.Text(text)) for text in sorted(texts))
            return f"{name} {'NOT ' if is_negated else ''}IN ({listed})"
        case t.All(terms) | t.Any(terms):
            word = " AND " if isinstance(part, t.All) else " OR "
            return word.join(f"({sql(term)})" for term in terms)
        case _:
            return leaf(part)


@given(conditions)
def test_what_is_printed_parses_to_the_same(condition: t.Expression) -> None:
    assert parse(sql(condition)) == condition


class Undefined(Exception):
    pass


def number(text: str, kind: t.Number) -> float:
    try:
        value = float(text) if kind is t.Number.DOUBLE else int(text)
    except ValueError:
        raise Undefined from None
    bits = {t.Number.INT32: 31, t.Number.INT64: 63}.get(kind)
    if bits is not None and not -(2**bits) <= value < 2**bits:
        raise Undefined
    return value


def naive(part: t.Expression, given: Mapping[str, str]) -> Any:  # noqa: C901 - as above
    """Interpret a tree as directly as possible."""
    match part:
        case t.Property(name):
            return given.get(name)
        case t.Numeric():
            return part
        case t.Text(value) | t.Truth(value):
            return value
        case t.Negative(operand):
            value = naive(operand, given)
            is_number = isinstance(value, t.Numeric)
            return t.Numeric(-value.value, value.kind) if is_number else None
        case t.Not(operand):
            value = truth(operand, given)
            return None if value is None else not value
        case t.IsNull(operand):
            return naive(operand, given) is None
        case t.In(name, texts, is_negated):
            return None if name not in given else (given[name] in texts) != is_negated
        case t.Equal(left, right):
            a, b = naive(left, given), naive(right, given)
            if a is None or b is None:
                return True if a is b else (None if a is None else False)
            return naive_equal(a, b)
        case t.Compare(left, order, right):
            a, b = naive(left, given), naive(right, given)
            if a is None or b is None:
                return None
            x, y = naive_number(a, b), naive_number(b, a)
            return {">": x > y, ">=": x >= y, "<": x < y, "<=": x <= y}[order.value]
        case t.All(terms) | t.Any(terms):
            return naive_joined(terms, given, decides=isinstance(part, t.Any))
        case _:
            raise AssertionError(part)


def truth(part: t.Expression, given: Mapping[str, str]) -> bool | None:
    value = naive(part, given)
    return value if value is None or isinstance(value, bool) else False


def naive_joined(
    terms: tuple[t.Expression, ...], given: Mapping[str, str], *, decides: bool
) -> bool | None:
    values = []
    for term in terms:
        values.append(truth(term, given))
        if values[-1] is decides:
            return decides
    return None if None in values else not decides


def naive_number(value: Any, other: Any) -> float:
    kind = other.kind if isinstance(other, t.Numeric) else t.Number.DOUBLE
    if isinstance(value, t.Numeric):
        return float(value.value) if kind is t.Number.DOUBLE else value.value
    return number(value, kind)


def naive_equal(a: Any, b: Any) -> bool:
    if isinstance(a, str) and isinstance(b, bool):
        return (a.lower() == "true") is b
    if isinstance(a, t.Numeric) or isinstance(b, t.Numeric):
        return naive_number(a, b) == naive_number(b, a)
    return bool(a == b)


values = st.sampled_from(["5", "-7", "abc", "", "true", "3.5", "1e3", "2147483648", "a", "b"])


@given(conditions, st.dictionaries(names, values))
def test_compiled_and_interpreted_results_are_equal(
    condition: t.Expression, given_properties: dict[str, str]
) -> None:
    compiled = compile_sql(sql(condition))
    try:
        expected: bool | str | None = truth(condition, given_properties)
    except Undefined:
        expected = "error"
    assert outcome(compiled, given_properties) == expected
    assert compiled.matches(given_properties) is (expected is True)


# --- conversions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0x1p3", True),
        ("0x1p99999", True),
        ("-0x1p99999", False),
        ("1_0", "error"),
        ("inf", "error"),
        ("-Infinity", False),
        ("1e999", True),
        ("7f", True),
        ("\x007 ", True),
        ("٧", "error"),
    ],
)
def test_doubles_are_read_as_java_reads_them(text: str, expected: bool | str) -> None:
    assert outcome(compile_sql("a > 6.5"), {"a": text}) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("٧", True), ("7_0", "error"), (" 7", "error"), ("9" * 5_000, "error"), ("+7", True)],
)
def test_integers_are_read_as_java_reads_them(text: str, expected: bool | str) -> None:
    assert outcome(compile_sql("a > 6"), {"a": text}) == expected


def test_two_properties_are_ordered_as_java_orders_doubles() -> None:
    above = compile_sql("a > b")
    assert above.result({"a": "NaN", "b": "Infinity"}) is True
    assert above.result({"a": "0.0", "b": "-0.0"}) is True
    assert above.result({"a": "-0.0", "b": "0.0"}) is False


def test_the_error_of_a_conversion_shows_the_value() -> None:
    with pytest.raises(ConversionFailed, match="expected a 32-bit integer, found 'abc'"):
        compile_sql("a = 5").result({"a": "abc"})


def test_line_comments_are_searched_only_where_they_can_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pair of minus signs would cause the rest of the text to be read, which is quadratic."""
    looked_at: list[int] = []

    class Pattern:
        def match(self, text: str, position: int) -> re.Match[str] | None:
            looked_at.append(position)
            return pattern.match(text, position)

    pattern = tokens._SKIPPED
    monkeypatch.setattr(tokens, "_SKIPPED", Pattern())
    text = "a = 1 -- one\nOR " + "a = --1 OR " * 1000 + "b = 2"
    assert compile_sql(text).matches({"a": "1"})
    assert max(looked_at) <= text.index("\n")
    assert not compile_sql("a = 1 -- one\r AND b = 2").matches({"a": "1"})
    assert compile_sql("-- one\n--two\n a = --1").matches({"a": "1"})
