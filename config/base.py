"""Base class of config sections: frozen dataclasses that check and document their fields.

A section is written once, as a dataclass with a docstring under each field:

    @dataclass(frozen=True)
    class Attention(ConfigSection):
        heads: PositiveInt = 4
        \"\"\"Number of attention heads.\"\"\"

and can then be built from plain data, listed field by field, and written back as plain data.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any, Self, get_type_hints

from config.errors import ConfigError, did_you_mean
from config.values import ValueType
from files.formatting import format_name, format_names, format_value
from files.yaml_files import location_prefix


@dataclass(frozen=True)
class ConfigSection:
    """Base class of config sections; creating one checks each field, then calls `validate`."""

    def __post_init__(self) -> None:
        for name, annotation in field_annotations(type(self)).items():
            value = getattr(self, name)
            if not is_section_type(annotation):
                value = _check_value(annotation, value, f"{type(self).__name__}.{name}")
                object.__setattr__(self, name, value)
            elif not isinstance(value, annotation):
                raise ConfigError(
                    f"{type(self).__name__}.{name} is {format_value(value)}, "
                    f"but must be a {annotation.__name__} section"
                )
        self.validate()

    def validate(self) -> None:
        """Check conditions on several fields; subclasses override it and raise `ConfigError`."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], path: str = "", location: str = "") -> Self:
        """Builds the section from plain data such as YAML; missing fields have defaults.

        Args:
            data: field names to values, nested for nested sections.
            path: dotted name of this section, for messages.
            location: start of messages about the section as a whole: "file, line 3: ".

        Raises:
            ConfigError: for an unknown name, a value of the wrong type, or one against a rule.
        """
        annotations = field_annotations(cls)
        if not isinstance(data, Mapping):
            names = format_names(annotations, 80)
            raise ConfigError(
                f"{location}{path} is {format_value(data)}, but must be a section with the fields "
                f"{names}"
            )
        values = {}
        for name, value in data.items():
            dotted, there = join_path(path, format_name(name)), location_prefix(data, name)
            if name not in annotations:
                close = did_you_mean(format_name(name), annotations, 100)
                raise ConfigError(f"{there}unknown field {dotted}{close}")
            annotation = annotations[name]
            if is_section_type(annotation):
                values[name] = annotation.from_dict(value, dotted, there)
            else:
                values[name] = _check_value(annotation, value, dotted, there)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the section as plain data, which `from_dict` reads."""
        return asdict(self)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Returns a validated copy with other field values, given by dotted path.

        Raises:
            ConfigError: as `from_dict`.
        """
        data = self.to_dict()
        for dotted, value in values.items():
            *path, name = dotted.split(".")
            inner = data
            for part in path:
                inner = inner[part]
            inner[name] = value
        return self.from_dict(data)


@dataclass(frozen=True)
class ConfigField:
    """A configuration field: dotted path from the root, value type and docstring."""

    path: str
    type: ValueType
    doc: str


def config_fields(section: type[ConfigSection]) -> Sequence[ConfigField]:
    """Returns the fields of a section and of its nested sections, in order of definition."""
    return _config_fields(section, "")  # type: ignore[arg-type]  # mypy thinks of hashes of instances


@cache
def _config_fields(section: Any, path: str) -> Sequence[ConfigField]:
    docs, leaves = field_docs(section), list[ConfigField]()
    for name, annotation in field_annotations(section).items():
        dotted = join_path(path, name)
        if is_section_type(annotation):
            leaves += _config_fields(annotation, dotted)
        else:
            leaves.append(
                ConfigField(dotted, ValueType.from_annotation(annotation), docs.get(name, ""))
            )
    return tuple(leaves)


def field_annotations(section: type[ConfigSection]) -> Mapping[str, Any]:
    """Returns the resolved type annotation of each field of a section, in order of definition."""
    return _resolve_annotations(section)  # type: ignore[arg-type]  # as above


@cache
def _resolve_annotations(section: Any) -> Mapping[str, Any]:
    hints = get_type_hints(section, include_extras=True)
    return MappingProxyType({field.name: hints[field.name] for field in fields(section)})


def field_docs(section: type[ConfigSection]) -> dict[str, str]:
    """Returns the docstring of each field of a section as one line; that of a subclass wins."""
    docs: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if owner is not ConfigSection and issubclass(owner, ConfigSection):
            docs.update(_class_field_docs(owner))
    return docs


def is_section_type(annotation: Any) -> bool:
    """Returns whether a type annotation is a nested config section."""
    return isinstance(annotation, type) and issubclass(annotation, ConfigSection)


def join_path(path: str, name: str) -> str:
    """Returns the dotted path of the field `name` inside the config section at `path`."""
    return f"{path}.{name}" if path else name


@cache
def _class_definitions(module: str) -> Mapping[str, ast.ClassDef]:
    """Returns the AST class definitions of a module's source, by class name."""
    nodes = ast.walk(ast.parse(inspect.getsource(sys.modules[module])))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def _class_field_docs(section: type[ConfigSection]) -> dict[str, str]:
    definition = _class_definitions(section.__module__)[section.__name__]
    docs = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs


def _check_value(annotation: Any, value: Any, name: str, location: str = "") -> Any:
    try:
        return ValueType.from_annotation(annotation).check(value, name)
    except ValueError as error:
        raise ConfigError(f"{location}{error}") from None


def flatten_by_path(section: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns the values of nested config mappings by dotted path, such as `model.eval`."""
    flat: dict[str, Any] = {}
    for name, value in section.items():
        inner = isinstance(value, Mapping)
        flat |= flatten_by_path(value, f"{path}{name}.") if inner else {f"{path}{name}": value}
    return flat


def nest_by_path(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested config mappings from values by dotted path; inverse of `flatten_by_path`."""
    whole: dict[str, Any] = {}
    for dotted, value in values.items():
        *sections, name = dotted.split(".")
        here = whole
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = value
    return whole
