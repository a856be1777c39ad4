"""A broker takes so many offsets in one commit as fit into one batch of its topic of offsets."""

from __future__ import annotations

from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.adapters.offset_commits import MAX_COMMIT_BYTES, in_commits

LONG = "t" * 240


def offsets_of(topic: str, number: int, metadata: str = "") -> list[KafkaTopicPartition]:
    return [KafkaTopicPartition(topic, each, 7, metadata) for each in range(number)]


def test_few_offsets_are_one_commit() -> None:
    offsets = offsets_of(LONG, 100)
    assert list(in_commits(offsets, "billing")) == [offsets]


def test_nothing_is_no_commit() -> None:
    assert list(in_commits([], "billing")) == []


def test_many_offsets_are_more_commits_and_each_is_in_one_of_them() -> None:
    offsets = offsets_of(LONG, 4_500)
    commits = list(in_commits(offsets, "billing"))
    assert [each for commit in commits for each in commit] == offsets
    assert 2 < len(commits) < 10
    assert all(sum(len(each.topic) for each in commit) <= MAX_COMMIT_BYTES for commit in commits)


def test_the_bytes_of_the_group_and_of_the_metadata_count_too() -> None:
    assert len(list(in_commits(offsets_of("t", 60), "ü" * 10_000))) > 1
    assert len(list(in_commits(offsets_of("t", 300, "m" * 4_000), "billing"))) > 1


def test_an_offset_that_is_larger_alone_is_a_commit_of_its_own() -> None:
    offsets = offsets_of("t", 3)
    assert list(in_commits(offsets, "g" * 2 * MAX_COMMIT_BYTES)) == [[each] for each in offsets]
