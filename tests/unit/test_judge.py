"""The judge of the benchmarks finds what it is there to find."""

from __future__ import annotations

from outbox_plugin.bench.judge import ReadRecord, RowId, Transaction, judge, value_of

FIRST, SECOND = Transaction(2, began=1.0, decided=2.0), Transaction(1, began=3.0, decided=4.0)
COMMITTED = {1: FIRST, 2: SECOND}


def seen(*rows: tuple[int, int], key: str = "k", partition: int = 0) -> list[ReadRecord]:
    """Records of a topic in this order, named by transaction and place."""
    return [ReadRecord(partition, offset, key, value_of(RowId(*row), key, "x" * 9)) for offset, row in enumerate(rows)]


def test_all_arrived_once_in_order() -> None:
    verdict = judge(COMMITTED, seen((1, 0), (1, 1), (2, 0)))
    assert verdict.clean
    assert (verdict.committed, verdict.arrived) == (3, 3)


def test_a_lost_row() -> None:
    verdict = judge(COMMITTED, seen((1, 0), (2, 0)))
    assert (verdict.lost, verdict.duplicates, verdict.order_violations) == (1, 0, 0)
    assert "row 1 of transaction 1" in verdict.examples[0]


def test_a_repeated_row_is_no_violation_of_order() -> None:
    verdict = judge(COMMITTED, seen((1, 0), (1, 1), (2, 0), (1, 0)))
    assert (verdict.lost, verdict.duplicates, verdict.order_violations) == (0, 1, 0)


def test_a_row_of_no_committed_transaction() -> None:
    verdict = judge(COMMITTED, seen((1, 0), (1, 1), (2, 0), (3, 0), (2, 1)))
    assert (verdict.phantoms, verdict.lost) == (2, 0)


def test_a_record_with_the_wrong_key() -> None:
    [record] = seen((2, 0))
    assert judge({2: SECOND}, [record._replace(key="another")]).phantoms == 1


def test_order_within_a_transaction() -> None:
    assert judge({1: FIRST}, seen((1, 1), (1, 0))).order_violations == 1


def test_order_between_transactions_of_which_one_began_after_the_other() -> None:
    assert judge(COMMITTED, seen((2, 0), (1, 0), (1, 1))).order_violations == 2


def test_transactions_at_the_same_time_may_come_in_either_order() -> None:
    at_once = {1: Transaction(1, began=1.0, decided=4.0), 2: Transaction(1, began=3.0, decided=5.0)}
    assert judge(at_once, seen((2, 0), (1, 0))).clean
    unknown = {1: Transaction(1, began=1.0), 2: Transaction(1, began=3.0, decided=5.0)}
    assert judge(unknown, seen((2, 0), (1, 0))).clean


def test_keys_have_nothing_to_do_with_each_other() -> None:
    records = seen((2, 0), key="a") + [each._replace(offset=each.offset + 1) for each in seen((1, 0), (1, 1), key="b")]
    assert judge(COMMITTED, records).clean


def test_a_key_in_two_partitions_has_no_order() -> None:
    records = seen((1, 0), (1, 1)) + seen((2, 0), partition=1)
    assert judge(COMMITTED, records).order_violations == 1


ASIDE = {1: FIRST._replace(aside=frozenset({1})), 2: SECOND}


def test_a_row_that_belongs_aside_is_there() -> None:
    verdict = judge(ASIDE, seen((1, 0), (2, 0)), [RowId(1, 1)])
    assert verdict.clean
    assert (verdict.committed, verdict.arrived, verdict.aside) == (3, 2, 1)


def test_a_row_that_belongs_aside_is_nowhere() -> None:
    assert judge(ASIDE, seen((1, 0), (2, 0))).lost == 1


def test_a_row_that_belongs_aside_arrived() -> None:
    verdict = judge(ASIDE, seen((1, 0), (1, 1), (2, 0)), [RowId(1, 1)])
    assert (verdict.phantoms, verdict.lost, verdict.duplicates) == (1, 0, 0)


def test_a_row_is_put_aside_twice() -> None:
    assert judge(ASIDE, seen((1, 0), (2, 0)), [RowId(1, 1), RowId(1, 1)]).duplicates == 1


def test_a_good_row_is_put_aside() -> None:
    verdict = judge(ASIDE, seen((1, 0)), [RowId(1, 1), RowId(2, 0), None])
    assert (verdict.phantoms, verdict.lost) == (2, 1)
