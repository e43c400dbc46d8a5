"""Block keys: what makes two full blocks the same. A key is its parent's key and the block's tokens, nothing hashed.

Equal keys are one object: a table interns them, and its lookups compare the tokens themselves, so two prefixes with
the same hash never meet (known fault BM-04). Keys live as long as a request or a cached block holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

__all__ = ["BlockKey", "KeyTable"]


class BlockKey:
    """Stands for the tokens of a full block and of all that come before it.

    Attributes:
        id: a number of its own, never used twice by a table.
        parent: the key of the block before; None at the start.
    """

    __slots__ = ("__weakref__", "id", "parent")

    def __init__(self, key_id: int, parent: BlockKey | None) -> None:
        self.id = key_id
        self.parent = parent

    def __repr__(self) -> str:
        return f"BlockKey({self.id})"


class KeyTable:
    """Hands out keys: one object per content.

    Keys come from tokens (`extend`), or carry the ids of a trace or a recording (`named`). A table is used one way
    or the other, not both.
    """

    def __init__(self) -> None:
        self._keys: WeakValueDictionary[Any, BlockKey] = WeakValueDictionary()
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._keys)

    def root(self, **tags: str | int) -> BlockKey | None:
        """What a chain starts from: None without tags, otherwise a key that only the same tags give.

        Tags have names (`salt`, `adapter`, `kv_dtype`), so that a salt never equals an adapter of the same text.
        """
        tags = {name: value for name, value in tags.items() if value not in ("", None)}
        return self._intern(("root", *sorted(tags.items())), None) if tags else None

    def extend(
        self, chain: list[BlockKey], root: BlockKey | None, token_ids: Sequence[int], block_size: int
    ) -> list[int]:
        """Append to `chain` the keys of the full blocks of `token_ids` that it lacks. Returns their ids."""
        new = []
        for start in range(len(chain) * block_size, len(token_ids) - block_size + 1, block_size):
            parent = chain[-1] if chain else root
            content = (parent.id if parent is not None else -1, tuple(token_ids[start : start + block_size]))
            chain.append(self._intern(content, parent))
            new.append(chain[-1].id)
        return new

    def named(self, chain: list[BlockKey], key_ids: Sequence[int]) -> None:
        """Append to `chain` keys with these ids."""
        for key_id in key_ids:
            key = self._keys.get(key_id)
            if key is None:
                key = self._keys[key_id] = BlockKey(key_id, chain[-1] if chain else None)
            chain.append(key)

    def _intern(self, content: tuple[Any, ...], parent: BlockKey | None) -> BlockKey:
        key = self._keys.get(content)
        if key is None:
            key = self._keys[content] = BlockKey(self._next_id, parent)
            self._next_id += 1
        return key
