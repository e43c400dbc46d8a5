"""Keys of full blocks: one object per content and parent, whatever it hashes to."""

import gc

from pagedinfer.memory.keys import KeyTable


def chain_of(table, token_ids, size=2, **tags):
    chain = []
    table.extend(chain, table.root(**tags), token_ids, size)
    return chain


def test_a_key_is_its_parent_and_the_blocks_tokens():
    table = KeyTable()
    first, second = chain_of(table, [1, 2, 3, 4, 5]), chain_of(table, [1, 2, 3, 9, 5])
    assert [key.id for key in first] == [0, 1]  # the fifth token fills no block
    assert [key.id for key in second] == [0, 2]
    assert first[0] is second[0]
    assert first[1].parent is first[0] is second[1].parent
    assert first[0].parent is None


def test_equal_tokens_under_two_parents_are_two_keys():
    table = KeyTable()
    a, b = chain_of(table, [1, 2, 7, 7]), chain_of(table, [3, 4, 7, 7])
    assert a[1] is not b[1]


def test_a_chain_grows_by_what_it_lacks():
    table, chain = KeyTable(), []
    assert table.extend(chain, None, [1, 2, 3], 2) == [0]
    assert table.extend(chain, None, [1, 2, 3], 2) == []
    assert table.extend(chain, None, [1, 2, 3, 4, 5, 6], 2) == [1, 2]
    assert [key.id for key in chain] == [0, 1, 2]


def test_tags_part_the_chains_and_their_names_count():
    table = KeyTable()
    assert table.root() is None
    assert table.root(salt="", adapter=None) is None
    assert table.root(salt="x") is table.root(salt="x")
    roots = [
        table.root(salt="x"),
        table.root(adapter="x"),
        table.root(salt="y"),
        table.root(salt="x", adapter="x"),
    ]
    assert len({id(root) for root in roots}) == 4
    chains = [chain_of(table, [1, 2]), chain_of(table, [1, 2], salt="x"), chain_of(table, [1, 2], salt="y")]
    assert len({chain[0].id for chain in chains}) == 3
    assert chains[1][0].parent is table.root(salt="x")


def test_no_two_contents_that_hash_alike_are_one_key():
    assert hash((-1, (-1, 5))) == hash((-1, (-2, 5)))  # -1 and -2 hash alike in Python
    table = KeyTable()
    assert chain_of(table, [-1, 5])[0] is not chain_of(table, [-2, 5])[0]


def test_keys_live_as_long_as_somebody_holds_them_and_ids_are_not_used_again():
    table = KeyTable()
    chain = chain_of(table, [1, 2, 3, 4])
    kept = chain[1]
    del chain
    gc.collect()
    assert len(table) == 2  # the second key holds its parent
    del kept
    gc.collect()
    assert len(table) == 0
    assert chain_of(table, [1, 2])[0].id == 2


def test_named_keys_of_a_trace_are_shared_by_id():
    table, first, second = KeyTable(), [], []
    table.named(first, [7, 9])
    table.named(second, [7, 11])
    assert first[0] is second[0]
    assert [key.id for key in second] == [7, 11]
    assert second[1].parent is second[0]
    assert repr(first[1]) == "BlockKey(9)"
