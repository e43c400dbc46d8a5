"""The undo log: inverses run backwards, once."""

from pagedinfer.memory.journal import Journal


def test_inverses_run_newest_first():
    journal, ran = Journal(), []
    for number in range(3):
        journal.record(lambda n=number: ran.append(n))
    assert len(journal) == 3
    journal.undo()
    assert ran == [2, 1, 0]


def test_undo_twice_does_nothing_more():
    journal, ran = Journal(), []
    journal.record(lambda: ran.append("once"))
    journal.undo()
    journal.undo()
    assert ran == ["once"]
    assert len(journal) == 0


def test_it_can_be_used_again_after_undo():
    journal, value = Journal(), [0]
    for _ in range(2):
        value[0] += 5
        journal.record(lambda: value.__setitem__(0, value[0] - 5))
        journal.undo()
        assert value == [0]
