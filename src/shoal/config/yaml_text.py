"""Parses YAML into plain data and records the line of every key. load.py calls it for files and override values.

Numbers and booleans follow YAML 1.2 (`2e-4` is a number, `on` and `no` are strings). Tags outside the core schema,
duplicate keys, and aliases that expand without limit raise ConfigError.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from shoal.core.errors import ConfigError

KeyPath = tuple[str | int, ...]
MAX_NODES = 20_000
_CORE = "tag:yaml.org,2002:"
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class CoreLoader(yaml.SafeLoader):
    """Resolves scalars by the YAML 1.2 core schema. `_Builder` below builds the values."""

    yaml_implicit_resolvers: dict[str, Any] = {}


for _kind, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)\Z", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)\Z", list("tTfF")),
    ("int", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z", list("-+0123456789")),
    (
        "float",
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z",
        list("-+.0123456789"),
    ),
):
    CoreLoader.add_implicit_resolver(_CORE + _kind, re.compile(_pattern), _first)


@dataclass(frozen=True)
class Document:
    """The parsed value, the line of each key, and the original text of values with `${VAR}`."""

    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)
    templates: dict[KeyPath, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """The name of a text in messages: a file, shown with the line, or a command-line argument."""

    name: str
    has_lines: bool = True

    def at(self, line: int) -> str:
        return f"{self.name}:{line}" if self.has_lines else self.name


def parse_yaml(text: str, source: Source, environ: Mapping[str, str], keys: Collection[str] = ()) -> Document:
    """Parse `text`. Every problem is a ConfigError with the source and the line.

    `${NAME}` is replaced by the environment variable, unless `keys` has the name: the launcher resolves those itself.
    """
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise ConfigError(f"{source.at(line)}: contains a NUL byte, so it is not YAML")
    try:
        return _Builder(source, environ, keys).document(CoreLoader(text).get_single_node())
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_yaml_problem(error, source)) from None
    except yaml.YAMLError as error:
        position = getattr(error, "position", 0)
        line = text[:position].count("\n") + 1 if isinstance(position, int) else 1
        raise ConfigError(f"{source.at(line)}: contains a character that YAML does not allow; remove it") from None
    except RecursionError:
        raise ConfigError(f"{source.at(1)}: is nested too deeply") from None


def _yaml_problem(error: yaml.MarkedYAMLError, source: Source) -> str:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 1
    problem = error.problem or error.context or "cannot be read"
    if "'\\t'" in problem:
        return f"{source.at(line)}: invalid YAML: a tab is used for indentation; indent with spaces"
    if "expected a single document" in (error.context or ""):
        return f"{source.at(line)}: invalid YAML: the file has several documents; keep one and remove the `---`"
    context = f" {error.context}" if error.context and error.problem else ""
    return f"{source.at(line)}: invalid YAML: {problem}{context}; check indentation, colons and quotes near this line"


class _Builder:
    def __init__(self, source: Source, environ: Mapping[str, str], keys: Collection[str] = ()) -> None:
        self.source = source
        self.environ = environ
        self.keys = keys
        self.lines: dict[KeyPath, int] = {}
        self.templates: dict[KeyPath, str] = {}
        self.count = 0
        self.open_nodes: set[int] = set()

    def document(self, node: Node | None) -> Document:
        value = None if node is None else self.build(node, ())
        return Document(value, self.lines, self.templates)

    def fail(self, node: Node, what: str) -> ConfigError:
        return ConfigError(f"{self.source.at(node.start_mark.line + 1)}: {what}")

    def build(self, node: Node, path: KeyPath) -> Any:
        self.count += 1
        if self.count > MAX_NODES:
            raise self.fail(node, f"expands to more than {MAX_NODES} values through aliases; write the values out")
        if id(node) in self.open_nodes:
            raise self.fail(node, "an alias refers to itself; write the value out")
        self.lines.setdefault(path, node.start_mark.line + 1)
        self.open_nodes.add(id(node))
        try:
            return self._by_kind(node, path)
        finally:
            self.open_nodes.discard(id(node))

    def _by_kind(self, node: Node, path: KeyPath) -> Any:
        if isinstance(node, MappingNode) and node.tag == _CORE + "map":
            return self.mapping(node, path)
        if isinstance(node, SequenceNode) and node.tag == _CORE + "seq":
            return [self.build(child, (*path, index)) for index, child in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return self.scalar(node, path)
        raise self.fail(node, f"the tag {node.tag!r} is not allowed; use plain YAML data")

    def mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, ScalarNode) or not isinstance(key, str):
                raise self.fail(key_node, "a key must be a string")
            if key in result:
                first = self.lines[(*path, key)]
                raise self.fail(key_node, f"{key}: duplicate key, already set on line {first}; keep one of them")
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            result[key] = self.build(value_node, (*path, key))
        return result

    def scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        text, tag = node.value, node.tag
        if "${" in text:
            self.templates[path] = text
            text = _VARIABLE.sub(lambda match: self.variable(match.group(1), node), text)
            if node.style is None:  # an unquoted ${LR} may be a number
                tag = CoreLoader("").resolve(ScalarNode, text, (True, False))
        return _scalar_value(text, tag, lambda: self.fail(node, f"the tag {node.tag!r} is not allowed"))

    def variable(self, name: str, node: Node) -> str:
        if name in self.keys:
            return f"${{{name}}}"
        if not _VARIABLE_NAME.match(name):
            raise self.fail(node, f"${{{name}}} is not the name of an environment variable")
        if name not in self.environ:
            raise self.fail(
                node, f"the environment variable {name} is not set; export {name}=… or write the value here"
            )
        return self.environ[name]


def _scalar_value(text: str, tag: str, refuse: Any) -> Any:
    kind = tag.removeprefix(_CORE)
    if kind == "str":
        return text
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    try:
        if kind == "int":
            return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
        if kind == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        return text  # an explicit !!int on other text, or too many digits: validation rejects the text
    raise refuse()
