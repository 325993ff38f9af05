"""From YAML text to trees of plain values, and from trees, of YAML or JSON, to values of annotated types.

Every error is a UserError that begins with `where`, the words for what is read.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from typing import Any, Literal

import yaml
from yaml.constructor import ConstructorError

from dflash_dist.errors import UserError

_NO_FILE_NAME = re.compile("[\0\ud800-\udfff]|[^/]{256}")
"""What calls into the operating system fail at: NUL, lone surrogates, and a name of over 255 characters."""


class _Loader(yaml.SafeLoader):
    """YAML as far as JSON can say it: keys are text and given once, a date is text, a whole number fits 64 bits."""

    yaml_constructors = {  # noqa: RUF012
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.endswith((":null", ":bool", ":float", ":str", ":seq"))
    }
    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def whole_number(self, node: yaml.ScalarNode) -> int:
        """The number; ConstructorError where it needs more than 64 bits."""
        number = self.construct_yaml_int(node)
        if number.bit_length() > 63:
            raise ConstructorError(None, None, "a whole number is past 64 bits", node.start_mark)
        return number

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        """The mapping, made in one go, so that one that holds itself fails; ConstructorError for a bad key."""
        seen = set()
        for key, _ in node.value:
            if not key.tag.endswith((":str", ":merge")):
                raise ConstructorError(None, None, "a key is not text; quote it", key.start_mark)
            if key.value in seen:
                raise ConstructorError(None, None, f"the key {key.value!r} is given a second time", key.start_mark)
            seen.add(key.value)
        return typing.cast(dict[str, Any], self.construct_mapping(node, deep=True))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.whole_number)
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.mapping)


def load_yaml(text: str, where: str) -> Any:
    """The tree of null, bool, int, float, str, list and dict that the YAML `text` holds."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line}: this is not YAML that can be used: {error.problem}") from None
    except Exception as error:  # whatever a constructor raises at a value that its tag does not fit, such as !!int x
        raise UserError(f"{where}: this is not YAML that can be used: {' '.join(str(error).split())}") from None


def build(kind: type, tree: dict[str, Any], where: str, prefix: str = "") -> Any:
    """An instance of the dataclass `kind` from a mapping; `prefix` stands before its keys in errors."""
    known = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for key in tree:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(known)}"
            raise UserError(f"{where}: unknown key {prefix}{key}; {hint}")
    required = [
        name
        for name, f in known.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    for name in required:
        if name not in tree:
            raise UserError(f"{where}: {prefix}{name} is missing; add it, or give {prefix}{name}=VALUE")
    values = {name: convert(hints[name], value, where, prefix + name) for name, value in tree.items()}
    return kind(**values)


def convert(hint: Any, value: Any, where: str, name: str) -> Any:
    """`value` as the annotated type; no silent casts but int and text to float, and list or one text to tuple."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return convert(next(a for a in arguments if a is not types.NoneType), value, where, name)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise UserError(f"{where}: {name} is {value!r}, but must be a section of keys")
        return build(typing.cast(type, hint), value, where, name + ".")
    if origin is Literal:
        if value not in arguments:
            raise UserError(f"{where}: {name} is {value!r}, but must be one of {', '.join(arguments)}")
        return value
    if origin in (tuple, dict):
        return _convert_collection(hint, value, where, name)
    return _convert_scalar(hint, value, where, name)


def _convert_collection(hint: Any, value: Any, where: str, name: str) -> Any:
    if typing.get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise UserError(f"{where}: {name} is {value!r}, but must be a mapping")
        return value
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise UserError(f"{where}: {name} is {value!r}, but must be a list")
    item_hint = typing.get_args(hint)[0]
    return tuple(convert(item_hint, item, where, f"{name}[{i}]") for i, item in enumerate(items))


def _convert_scalar(hint: type, value: Any, where: str, name: str) -> Any:
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        value = _as_float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: {name} is {value}, but must be finite")
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{where}: {name} is {value!r}, but must be of type {hint.__name__}")
    if isinstance(value, str) and _NO_FILE_NAME.search(value):
        raise UserError(f"{where}: {name} is {value!r}, but no file can have that name")
    return value


def _as_float(value: int | str) -> float | int | str:
    """The number, or the value itself where it is none. YAML 1.1 reads `6e-4` as text; it is meant as a number."""
    try:
        return float(value)
    except (ValueError, OverflowError):
        return value
