"""The draw depends on content and seed alone."""

from hypothesis import given
from hypothesis import strategies as st

from oneaxis.data.sample import distinct, drawn, interleaved

rows = st.lists(st.fixed_dictionaries({"text": st.text(alphabet="abc", max_size=3)}), max_size=20)


def text(row: dict[str, str]) -> str:
    return row["text"]


@given(rows, st.randoms())
def test_the_order_of_the_input_does_not_matter(given_rows: list[dict[str, str]], random: object) -> None:
    shuffled = list(given_rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert drawn(given_rows, text, seed=1, table="t") == drawn(shuffled, text, seed=1, table="t")


def test_seed_and_table_change_the_order() -> None:
    many = [{"text": str(number)} for number in range(50)]
    orders = [drawn(many, text, seed=seed, table=table) for seed, table in ((0, "t"), (1, "t"), (0, "u"))]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    assert [sorted(map(text, order)) for order in orders] == [sorted(map(text, many))] * 3


def test_a_row_that_is_added_leaves_the_order_of_the_others() -> None:
    many = [{"text": str(number)} for number in range(50)]
    without = drawn(many[:-1], text, seed=0, table="t")
    assert [row for row in drawn(many, text, seed=0, table="t") if row != many[-1]] == without


@given(rows)
def test_distinct_keeps_the_first_of_each_and_counts_the_rest(given_rows: list[dict[str, str]]) -> None:
    kept, dropped = distinct(given_rows, text)
    assert len({text(row) for row in given_rows}) == len(kept)
    assert len(kept) + dropped["duplicate"] == len(given_rows)


def test_groups_take_turns_by_name() -> None:
    taken = interleaved([{"text": name} for name in ("b1", "b2", "b3", "a1")], lambda row: row["text"][0])
    assert [row["text"] for row in taken] == ["a1", "b1", "b2", "b3"]
