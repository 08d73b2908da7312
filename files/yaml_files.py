"""YAML reading with line numbers, restricted to plain data, and YAML writing.

Configurations need only a part of YAML, and the rest is where foreign files do harm. Left out are
anchors and aliases (a kilobyte that unfolds to a gigabyte), tags (objects, code), several
documents, and values that turn into dates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from files.errors import FileError
from files.file_location import FileLocation
from files.formatting import format_name, format_path, format_value
from files.text_files import read_text

MAX_BYTES = 2**18
MAX_DEPTH = 20
"""Maximum nesting depth; a configuration has four levels."""

_PREFIX = "tag:yaml.org,2002:"
_SCALARS = ("null", "bool", "int", "float", "str")
# libyaml's parser yields events and does not recurse; PyYAML's own is the fallback.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_RESOLVER, _CONSTRUCTOR = yaml.resolver.Resolver(), yaml.constructor.SafeConstructor()


class LocatedDict(dict[str, Any]):
    """A dict from YAML that stores the file location of each value.

    Attributes:
        locations: file locations by key; keys that do not come from a file are missing.
    """

    def __init__(
        self, values: Mapping[str, Any] = {}, locations: Mapping[str, FileLocation] = {}
    ) -> None:
        super().__init__(values)
        self.locations = dict(locations)


def location_prefix(data: Mapping[str, Any], key: str) -> str:
    """Prefix of a message about a value of `data`: "file, line n: ", or "" without a file."""
    location = data.locations.get(key) if isinstance(data, LocatedDict) else None
    return f"{location}: " if location else ""


def read_yaml(path: Path) -> LocatedDict:
    """Read a YAML file that holds a mapping of plain data.

    Keys are text as they are written.

    Raises:
        FileError: with file and line, if it is anything else.
    """
    text = read_text(path, MAX_BYTES)
    try:
        data = _compose_document(yaml.parse(text, _Loader), path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark  # at the end of the text, libyaml counts a line that is not there
        line = min(mark.line, text.rstrip().count("\n")) + 1 if mark else 1
        problem = format_name(error.problem or "is not YAML")
        raise FileError(f"{FileLocation(path, line)}: {problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = format_name(str(error).partition("\n")[0])
        raise FileError(f"{format_path(path)} is not YAML: {reason}") from None
    if not isinstance(data, LocatedDict):
        type_name = "nothing" if data is None else type(data).__name__
        raise FileError(f"{format_path(path)} must hold a mapping, not {type_name}")
    return data


def dump_yaml(data: Mapping[str, Any]) -> str:
    """Format plain data as YAML text, in insertion order."""
    return yaml.safe_dump(dict(data), sort_keys=False)


class _OpenContainer(NamedTuple):
    """A YAML list or mapping under construction, and the key of the mapping's next value."""

    container: list[Any] | LocatedDict
    keys: list[str]


def _compose_document(events: Iterator[yaml.Event], path: Path) -> Any:
    """Build plain data from the parser events of one YAML document, without recursion."""
    result: list[Any] = []
    stack = [_OpenContainer(result, [])]
    for event in events:
        match event:
            case yaml.DocumentStartEvent() if result:
                raise _yaml_error(
                    path, event.start_mark, "a second document begins, but one is read"
                )
            case yaml.AliasEvent():
                name = format_name(event.anchor)
                raise _yaml_error(
                    path, event.start_mark, f"*{name} is an alias: write the value out"
                )
            case yaml.NodeEvent(anchor=str(name)):
                raise _yaml_error(path, event.start_mark, f"&{format_name(name)} is an anchor: "
                             "write the value out where it is used")  # fmt: skip
            case yaml.ScalarEvent():
                _append_value(stack[-1], event, path, None)
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                if len(stack) > MAX_DEPTH:
                    raise _yaml_error(
                        path, event.start_mark, f"nested deeper than {MAX_DEPTH} levels"
                    )
                tag_name = "map" if isinstance(event, yaml.MappingStartEvent) else "seq"
                _check_yaml_tag(event, (tag_name,), path)
                container = _OpenContainer(LocatedDict() if tag_name == "map" else [], [])
                _append_value(stack[-1], event, path, container.container)
                stack.append(container)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                stack.pop()
    return result[0] if result else None


def _append_value(
    parent: _OpenContainer, event: Any, path: Path, container: list[Any] | LocatedDict | None
) -> None:
    """Append a YAML scalar or container to the list or mapping under construction."""
    if isinstance(parent.container, list):
        parent.container.append(_parse_scalar(event, path) if container is None else container)
    elif parent.keys:
        key = parent.keys.pop()
        parent.container[key] = _parse_scalar(event, path) if container is None else container
    elif container is not None:
        raise _yaml_error(path, event.start_mark, "a name must be text, not a list or mapping")
    else:
        key = event.value
        if key in parent.container.locations:
            raise _yaml_error(path, event.start_mark, f"the key {format_value(key)} stands twice")
        parent.container.locations[key] = FileLocation(path, event.start_mark.line + 1)
        parent.keys.append(key)


def _parse_scalar(event: Any, path: Path) -> Any:
    """Convert a YAML scalar to str, int, float, bool or None; dates and invalid numbers are str."""
    _check_yaml_tag(event, _SCALARS, path)
    tag = event.tag
    if tag is None or tag == "!":
        tag = _RESOLVER.resolve(yaml.ScalarNode, event.value, event.implicit)
    node = yaml.ScalarNode(tag, event.value)
    try:
        match tag.removeprefix(_PREFIX):
            case "null":
                return None
            case "bool":
                return _CONSTRUCTOR.construct_yaml_bool(node)
            case "int" if ":" not in event.value:  # YAML 1.1 reads 1:30 as 90
                number = _CONSTRUCTOR.construct_yaml_int(node)
                str(number)  # raises where Python writes no number of so many digits
                return number
            case "float" if ":" not in event.value:
                return _CONSTRUCTOR.construct_yaml_float(node)
    except (ValueError, OverflowError, KeyError, IndexError):
        pass
    return event.value


def _check_yaml_tag(event: Any, allowed: tuple[str, ...], path: Path) -> None:
    if event.tag not in (None, "!", *(_PREFIX + name for name in allowed)):
        tag = format_name(event.tag)
        raise _yaml_error(path, event.start_mark, f"the tag {tag} is not read: write a plain value")


def _yaml_error(path: Path, mark: Any, problem: str) -> FileError:
    return FileError(f"{FileLocation(path, mark.line + 1)}: {problem}")
