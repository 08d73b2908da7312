import copy

import pytest

from popxl_addons.dot_tree import DotTree, sanitise, to_mapping
from popxl_addons.named_tensors import NamedTensorData


@pytest.fixture
def tree():
    return DotTree(b=DotTree(x=1, deep=DotTree(y=2)), a=3)


def test_leaves_are_reached_by_attribute_and_by_dotted_key(tree):
    assert tree.b.deep.y == tree["b.deep.y"] == tree.get("b.deep.y") == 2
    assert "b.deep" in tree
    assert "b.nothing" not in tree


def test_order_is_that_of_insertion(tree):
    assert tree.keys() == ["b", "a"]
    assert tree.keys_flat() == ["b.x", "b.deep.y", "a"]
    assert tree.values_flat() == [1, 2, 3]
    assert tree.values()[1] == 3
    assert (tree.len(), tree.len_flat()) == (2, 3)


def test_integers_name_children_of_lists():
    layers = DotTree()
    layers.insert(0, "first")
    layers.insert("1.weight", "second")
    assert layers[0] == layers["0"] == "first"
    assert layers[1].weight == "second"


def test_sanitise_leaves_only_what_a_name_can_hold():
    assert sanitise("layer/0 bias") == "layer_0_bias"
    with pytest.raises(ValueError, match="empty"):
        sanitise("")


def test_insert_creates_levels_and_refuses_to_replace(tree):
    tree.insert("new.level.z", 5)
    assert tree.new.level.z == 5
    with pytest.raises(ValueError, match="overwrite"):
        tree.insert("a", 4)
    tree.insert("a", 4, overwrite=True)
    assert tree.a == 4
    tree.insert("a.below", 1, overwrite=True)  # the leaf becomes a level
    assert tree.a.to_dict() == {"below": 1}


def test_the_first_part_of_a_key_must_be_new():
    tree = DotTree()
    tree.insert("a.b.x", 1)
    for key in ("a.b.y", "a.b.x", "a.c", "a"):
        with pytest.raises(ValueError, match="'a' exists already"):
            tree.insert(key, 2)
    assert tree.to_dict() == {"a.b.x": 1}
    tree.insert("a.b.y", 2, overwrite=True)
    assert tree.to_dict() == {"a.b.x": 1, "a.b.y": 2}


@pytest.mark.parametrize(
    "key", ["", "a-b", "-1", -1, "a..b", ".a", "a.", "a.b c", "1a", "a.0x", "layer/0", "²"]
)
def test_keys_are_names_or_digits(key):
    tree = DotTree()
    with pytest.raises(ValueError, match="must be a Python name or digits"):
        tree.insert(key, 1)
    assert key not in tree
    assert tree.len() == 0
    with pytest.raises(ValueError, match="is no key"):
        DotTree.from_dict({key: 1})


@pytest.mark.parametrize("key", [0, "0", "007", "a", "_a", "a1", "class", "ü", "a.0.b", "0.1"])
def test_a_key_is_kept_as_it_is(key):
    tree = DotTree()
    tree.insert(key, 1)
    assert tree.keys_flat() == [str(key)]
    assert tree.get(key) == 1


def test_assignment_inserts(tree):
    tree.a = 7
    tree["b.x"] = 8
    assert tree.to_dict() == {"b.x": 8, "b.deep.y": 2, "a": 7}


def test_missing_names_are_told_with_what_there_is(tree):
    with pytest.raises(KeyError, match=r"'q' is not in \['x', 'deep'\]"):
        tree.get("b.q")
    with pytest.raises(AttributeError, match="not in"):
        _ = tree.q


def test_pop_removes(tree):
    assert tree.pop("b.deep.y") == 2
    assert tree.keys_flat() == ["b.x", "a"]


def test_negative_numbers_count_from_the_largest():
    tree = DotTree(layers=DotTree())
    tree.insert("layers.0", "a", overwrite=True)
    tree.insert("layers.10", "b", overwrite=True)
    assert tree.layers[-1] == tree.get("layers.-1") == "b"
    assert tree.layers.get(-11) == "a"
    with pytest.raises(KeyError):  # 9 is a gap
        tree.layers[-2]
    with pytest.raises(ValueError, match="no key of a tree"):
        tree.layers.insert(-1, "c")
    with pytest.raises(KeyError):
        DotTree(a=1)[-1]


def test_update_replaces_what_is_on_the_first_level(tree):
    tree.update(DotTree(c=DotTree(x=1, y=2)))
    with pytest.raises(ValueError, match=r"\['b'\] exist already"):
        tree.update(DotTree(new=0, b=DotTree(z=9)))
    assert "new" not in tree
    tree.update(DotTree(b=DotTree(z=9), a=0), overwrite=True)
    assert tree.to_dict() == {"b.z": 9, "a": 0, "c.x": 1, "c.y": 2}


def test_filter_keys_takes_leaves_and_levels_in_the_order_asked_for(tree):
    assert tree.filter_keys(["a", "b.deep"]).keys_flat() == ["a", "b.deep.y"]
    with pytest.raises(KeyError, match="missing"):
        tree.filter_keys(["a", "missing"])
    with pytest.raises(ValueError, match="twice"):
        tree.filter_keys(["a", "b", "a"])


def test_unpacking_sorts_and_other_views_keep_the_order_of_insertion():
    tree = DotTree(b=DotTree(z=1, a=2), a=3)
    assert tree.unpack() == (["a", "b.a", "b.z"], [3, 2, 1])
    assert tree.keys() == ["b", "a"]
    assert list(tree.to_dict()) == ["b.z", "b.a", "a"]
    assert tree.values()[1] == 3


def test_copy_shares_leaves_but_no_levels(tree):
    for other in (tree.copy(), copy.deepcopy(tree)):
        other.insert("b.deep.z", 1, overwrite=True)
        assert "b.deep.z" not in tree


def test_dicts_and_lists_there_and_back(tree):
    assert DotTree.from_dict(tree.to_dict()).to_dict() == tree.to_dict()
    assert dict(DotTree.pack(*tree.unpack()).to_dict()) == dict(tree.to_dict())
    assert DotTree.pack(["a"], [1, 2]).to_dict() == {"a": 1}
    assert DotTree.pack(["a", "b"], [1]).to_dict() == {"a": 1}


def test_map_keeps_class_and_names():
    data = NamedTensorData(w=NamedTensorData(x=2))
    doubled = data.map(lambda v: v * 2)
    assert isinstance(doubled.w, NamedTensorData)
    assert doubled.to_dict() == {"w.x": 4}


def test_mapping_joins_leaves_of_equal_names(tree):
    values = DotTree(a="A", b=DotTree(x="X"), other="O")
    assert tree.to_mapping(values) == to_mapping(tree, values) == {1: "X", 3: "A"}
