from __future__ import annotations

import pytest

from turbopump.errors import InvalidArgument
from turbopump.filters.tags import EVERYTHING, parse_tags
from vectors import Vector, load

EXPRESSIONS = load("codecs.json")["tagExpressions"]


@pytest.mark.parametrize("vector", EXPRESSIONS)
def test_expressions_as_the_original_reads_them(vector: Vector) -> None:
    if "error" in vector:
        with pytest.raises(InvalidArgument, match="has no tag"):
            parse_tags(vector["expression"])
        return
    found = parse_tags(vector["expression"])
    assert sorted(found.tags) == sorted(vector["tags"])
    assert sorted(found.codes) == sorted(vector["codes"])
    assert found.everything == (vector["subString"] == EVERYTHING)


def test_order_of_the_expression_is_kept() -> None:
    assert parse_tags("b || a").tags == ("b", "a")
