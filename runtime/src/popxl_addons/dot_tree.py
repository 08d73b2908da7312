"""A tree of named leaves with attribute access and dotted names, such as `layer.0.weight`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from popxl_addons.utils import OrderedDict

L = TypeVar("L")
K = TypeVar("K")
V = TypeVar("V")
CLS = TypeVar("CLS", bound="DotTree[Any]")

_UNSAFE = re.compile(r"\W")
_NEGATIVE = re.compile(r"-[0-9]+", re.ASCII)


def sanitise(name: str | int) -> str:
    """Replace each character that a tree's key must not contain by `_`.

    Integers keep their digits, so that children of a list are `"0"`, `"1"`, ... `insert` rewrites
    no keys: a program that has names of another origin makes keys of them with this.

    Raises:
        ValueError: the name is empty.
    """
    text = _UNSAFE.sub("_", str(name))
    if not text:
        raise ValueError("a key of a tree cannot be empty")
    return text


def _split_key(key: str | int) -> list[str]:
    return str(key).split(".")


def split_valid_key(key: str | int) -> list[str]:
    """Split a dotted key of a tree; ValueError unless each component is an identifier or digits."""
    parts = _split_key(key)
    for part in parts:
        if not (part.isidentifier() or (part.isascii() and part.isdigit())):
            raise ValueError(
                f"{key!r} is no key of a tree: each part between dots must be a Python name or "
                f"digits, but {part!r} is neither"
            )
    return parts


class DotTree(Generic[L]):
    """A tree of leaves of one type with dotted names, in insertion order.

    `tree.a.b`, `tree["a.b"]` and `tree.get("a.b")` are the same leaf; integers name the children
    of lists: `tree[0]` is `tree["0"]`, and negative ones count from the largest: `tree[-1]`.
    Subtrees have the class of the tree.

    Example:
        >>> tree = DotTree(a=1, b=DotTree(c=2))
        >>> tree.b.c, tree["b.c"], tree.to_dict()
        (2, 2, OrderedDict({'a': 1, 'b.c': 2}))
    """

    _map: OrderedDict[str, Any]

    def __init__(self, **kwargs: Any) -> None:
        object.__setattr__(self, "_map", OrderedDict())
        for key, value in kwargs.items():
            self.insert(key, value)

    # ---- one entry ------------------------------------------------------------------------------
    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        try:
            return self.get(key)
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __setattr__(self, key: str, value: Any) -> None:
        if key.startswith("_"):
            object.__setattr__(self, key, value)
        else:
            self.insert(key, value, overwrite=True)

    def __getitem__(self, key: str | int) -> Any:
        return self.get(key)

    def __setitem__(self, key: str | int, value: Any) -> None:
        self.insert(key, value, overwrite=True)

    def get(self, key: str | int) -> Any:
        """Return the leaf or subtree at a (dotted) key.

        Raises:
            KeyError: there is none; the message lists the names at that level.
        """
        node: Any = self
        for part in _split_key(key):
            if isinstance(node, DotTree) and _NEGATIVE.fullmatch(part):
                part = str(1 + max(map(int, filter(str.isdigit, node._map)), default=0) + int(part))
            if not isinstance(node, DotTree) or part not in node._map:
                names = list(node._map) if isinstance(node, DotTree) else []
                raise KeyError(
                    f"{type(self).__name__} has no {str(key)!r}: {part!r} is not in {names}"
                )
            node = node._map[part]
        return node

    def insert(self, key: str | int, value: Any, overwrite: bool = False) -> None:
        """Add a leaf or a subtree at a key; missing levels of a dotted key are created.

        Args:
            overwrite: replace what is there; levels of a dotted key that exist gain the new name
                and keep the others, and a leaf on the way becomes a level.

        Raises:
            ValueError: a part of the key is neither a Python name nor digits; or the first part
                exists already and `overwrite` is not set.
        """
        *path, last = parts = split_valid_key(key)
        if parts[0] in self._map and not overwrite:
            raise ValueError(
                f"{parts[0]!r} exists already, so {str(key)!r} cannot be inserted: pass "
                "overwrite=True to replace it"
            )
        node: Any = self
        for part in path:
            if not isinstance(node._map.get(part), DotTree):
                node._map[part] = type(self)()
            node = node._map[part]
        node._map[last] = value

    def pop(self, key: str | int) -> Any:
        """Remove and return the leaf or subtree at a key; raises KeyError if there is none."""
        value = self.get(key)
        *path, last = _split_key(key)
        parent = self.get(".".join(path)) if path else self
        del parent._map[last]
        return value

    def __contains__(self, key: object) -> bool:
        try:
            self.get(key)  # type: ignore[arg-type]
        except KeyError:
            return False
        return True

    # ---- whole trees ----------------------------------------------------------------------------
    def update(self, values: DotTree[L] | Mapping[str, L], overwrite: bool = False) -> None:
        """Insert all leaves and subtrees of the mapping `values`.

        Args:
            overwrite: replace those of the same name, as a whole.

        Raises:
            ValueError: as for `insert`; without `overwrite` no name of the first level may be in
                both. Nothing is changed then.
        """
        new = values if isinstance(values, DotTree) else type(self).from_dict(values)
        both = [key for key in new._map if key in self._map]
        if both and not overwrite:
            raise ValueError(f"{both} exist already: pass overwrite=True to replace them")
        for key, value in new.copy()._map.items():
            self._map[key] = value

    def copy(self: CLS) -> CLS:
        """Return a tree with the same leaves and copied subtrees."""
        return self.map(lambda leaf: leaf)

    def map(self: CLS, fn: Callable[[Any], Any]) -> CLS:
        """Return a tree of the same class and names with leaves `fn(leaf)`."""
        out = type(self)()
        for key, value in self._map.items():
            out._map[key] = value.map(fn) if isinstance(value, DotTree) else fn(value)
        return out

    def filter_keys(self: CLS, keys: Iterable[str | int]) -> CLS:
        """Return the tree of the leaves and subtrees at `keys`, in the order of `keys`.

        Raises:
            KeyError: there is no such name.
            ValueError: a name is given twice.
        """
        names = [str(key) for key in keys]
        if len(set(names)) < len(names):
            raise ValueError(f"{names} has a name twice")
        out = self.from_dict({name: self.get(name) for name in names})
        return out.copy()

    # ---- flat views -----------------------------------------------------------------------------
    def _flat(self) -> Iterator[tuple[str, Any]]:
        for key, value in self._map.items():
            if isinstance(value, DotTree):
                yield from ((f"{key}.{name}", leaf) for name, leaf in value._flat())
            else:
                yield key, value

    def keys(self) -> list[str]:
        """Return the names of leaves and subtrees on the first level."""
        return list(self._map)

    def keys_flat(self) -> list[str]:
        """Return the dotted names of all leaves."""
        return [name for name, _ in self._flat()]

    def values(self) -> list[Any]:
        """Return the leaves and subtrees on the first level."""
        return list(self._map.values())

    def values_flat(self) -> list[Any]:
        """Return all leaves of the tree."""
        return [leaf for _, leaf in self._flat()]

    def len(self) -> int:
        """Return the number of leaves and subtrees on the first level."""
        return len(self._map)

    def len_flat(self) -> int:
        """Return the number of leaves of the tree."""
        return sum(1 for _ in self._flat())

    def to_dict(self) -> OrderedDict[str, L]:
        """Return all leaves by dotted name."""
        return OrderedDict(self._flat())

    @classmethod
    def from_dict(cls: type[CLS], d: Mapping[Any, Any]) -> CLS:
        """Create a tree from a dict of leaves or subtrees; keys can be dotted.

        Raises:
            ValueError: a key is none, as for `insert`.
        """
        out = cls()
        for key, value in d.items():
            out.insert(key, value, overwrite=True)
        return out

    def unpack(self) -> tuple[list[str], list[L]]:
        """Return (dotted names, leaves), sorted by name; the inverse of `pack`."""
        flat = self.to_dict()
        names = sorted(flat)
        return names, [flat[name] for name in names]

    @classmethod
    def pack(cls: type[CLS], keys: Iterable[str], values: Iterable[Any]) -> CLS:
        """Create a tree from `keys` and `values`; surplus items of the longer one are ignored."""
        return cls.from_dict(OrderedDict(zip(keys, values, strict=False)))

    def to_mapping(self, values: DotTree[V]) -> dict[L, V]:
        """Map each leaf of this tree to the leaf of the same name in the tree `values`.

        Names that only one of the trees has are left out: a graph may be bound in steps.
        """
        flat = values.to_dict()
        return {leaf: flat[name] for name, leaf in self._flat() if name in flat}

    def __repr__(self) -> str:
        body = ", ".join(f"{name}={leaf!r}" for name, leaf in self._flat())
        return f"{type(self).__name__}({body})"


def to_mapping(key: DotTree[K], value: DotTree[V]) -> dict[K, V]:
    """Map a tree's leaves, or a leaf, to values of the same names; see `DotTree.to_mapping`."""
    return key.to_mapping(value)
