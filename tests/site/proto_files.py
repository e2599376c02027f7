"""Reads the contract: the services, messages and enums of .proto files, with comments.

protoc parses the files; this module takes comments by the places that it reports.

Example:
    for file in read_contract(Path("proto")):
        for service in file.services:
            print(service.name, [method.name for method in service.methods])
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

PACKAGE: Final = "storesvc.v1"

_Place = tuple[int, ...]

# Numbers of the fields of FileDescriptorProto, DescriptorProto and so on, which make
# up the path of a place.
_MESSAGES, _ENUMS, _SERVICES, _SYNTAX = 4, 5, 6, 12
_FIELDS, _NESTED_MESSAGES, _NESTED_ENUMS = 2, 3, 4
_VALUES = _METHODS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One rpc."""

    name: str
    request: str
    response: str
    comment: str

    def own_reasons(self) -> set[str]:
        """Returns the names in capitals that its ``Errors:`` list."""
        return set(re.findall(r"`([A-Z][A-Z_]+)`", self._errors()))

    def same_as(self) -> set[str]:
        """Returns the rpcs whose errors it has, too: ``As GetCheckpoint``."""
        return set(re.findall(r"\b[Aa]s ([A-Z]\w+)", self._errors()))

    def _errors(self) -> str:
        return self.comment.partition("Errors:")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service and its rpcs."""

    name: str
    comment: str
    methods: Sequence[Method]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a message, or a value of an enum, which has no type."""

    name: str
    number: int
    type: str
    comment: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A message or an enum, with the names of the messages around it."""

    name: str
    comment: str
    fields: Sequence[Field]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtoFile:
    """A .proto file."""

    name: str
    comment: str
    services: Sequence[Service]
    messages: Sequence[Declaration]
    enums: Sequence[Declaration]


def read_contract(folder: Path) -> list[ProtoFile]:
    """Returns the files of the contract, by name.

    Args:
        folder: Folder above ``storesvc/v1``.

    Raises:
        ValueError: protoc rejects the files.
    """
    # Imported here: the tests of pages do without protoc.
    from grpc_tools import protoc  # type: ignore[import-untyped]  # has no annotations

    sources = sorted(str(path) for path in folder.rglob("*.proto"))
    with TemporaryDirectory() as place:
        target = Path(place, "set.binpb")
        arguments = [f"-I{folder}", f"-I{files('grpc_tools') / '_proto'}", *sources]
        options = ["--include_source_info", f"--descriptor_set_out={target}"]
        if protoc.main(["protoc", *options, *arguments]):
            raise ValueError(f"{folder}: expected a contract, and protoc rejects it")
        found = FileDescriptorSet.FromString(target.read_bytes())
    return [_Reader(file).file() for file in found.file if file.package == PACKAGE]


class _Reader:
    """Reads one file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments: dict[_Place, str] = {}
        self._detached: dict[_Place, str] = {}
        for place in file.source_code_info.location:
            path = tuple(place.path)
            self._comments[path] = unindented(place.leading_comments)
            self._detached[path] = "\n".join(
                unindented(text) for text in place.leading_detached_comments
            )

    def file(self) -> ProtoFile:
        messages = self._messages(self._file.message_type, (_MESSAGES,), "")
        return ProtoFile(
            name=Path(self._file.name).stem,
            comment=self._detached.get((_SYNTAX,), ""),
            services=[
                self._service(service, (_SERVICES, at))
                for at, service in enumerate(self._file.service)
            ],
            messages=list(messages),
            enums=[
                *self._enums(self._file.enum_type, (_ENUMS,), ""),
                *self._nested_enums(self._file.message_type, (_MESSAGES,), ""),
            ],
        )

    def _comment(self, place: _Place) -> str:
        return self._comments.get(place, "")

    def _service(self, service: ServiceDescriptorProto, place: _Place) -> Service:
        return Service(
            name=service.name,
            comment=self._comment(place),
            methods=[
                Method(
                    name=method.name,
                    request=_stream(method.input_type, method.client_streaming),
                    response=_stream(method.output_type, method.server_streaming),
                    comment=self._comment((*place, _METHODS, at)),
                )
                for at, method in enumerate(service.method)
            ],
        )

    def _messages(
        self, messages: Iterable[DescriptorProto], place: _Place, outer: str
    ) -> Iterator[Declaration]:
        for at, message in enumerate(messages):
            if message.options.map_entry:
                continue
            entries = {
                nested.name: nested
                for nested in message.nested_type
                if nested.options.map_entry
            }
            yield Declaration(
                name=outer + message.name,
                comment=self._comment((*place, at)),
                fields=[
                    Field(
                        name=field.name,
                        number=field.number,
                        type=_field_type(field, entries),
                        comment=self._comment((*place, at, _FIELDS, index)),
                    )
                    for index, field in enumerate(message.field)
                ],
            )
            yield from self._messages(
                message.nested_type,
                (*place, at, _NESTED_MESSAGES),
                f"{outer}{message.name}.",
            )

    def _enums(
        self, enums: Iterable[EnumDescriptorProto], place: _Place, outer: str
    ) -> Iterator[Declaration]:
        for at, enum in enumerate(enums):
            yield Declaration(
                name=outer + enum.name,
                comment=self._comment((*place, at)),
                fields=[
                    Field(
                        name=value.name,
                        number=value.number,
                        type="",
                        comment=self._comment((*place, at, _VALUES, index)),
                    )
                    for index, value in enumerate(enum.value)
                ],
            )

    def _nested_enums(
        self, messages: Iterable[DescriptorProto], place: _Place, outer: str
    ) -> Iterator[Declaration]:
        for at, message in enumerate(messages):
            below, name = (*place, at), f"{outer}{message.name}."
            yield from self._enums(message.enum_type, (*below, _NESTED_ENUMS), name)
            yield from self._nested_enums(
                message.nested_type, (*below, _NESTED_MESSAGES), name
            )


def unindented(comment: str) -> str:
    """Returns a comment without the space behind each ``//``."""
    return "\n".join(line.removeprefix(" ") for line in comment.splitlines()).strip()


def _stream(name: str, is_stream: bool) -> str:
    return f"stream {_short(name)}" if is_stream else _short(name)


def _short(name: str) -> str:
    """Returns ``Foo.Bar`` for ``.storesvc.v1.Foo.Bar``."""
    return name.removeprefix(f".{PACKAGE}.").removeprefix(".google.protobuf.")


def _field_type(
    field: FieldDescriptorProto, entries: Mapping[str, DescriptorProto]
) -> str:
    kind = field.type_name or FieldDescriptorProto.Type.Name(field.type)
    entry = entries.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        key, value = (_field_type(part, {}) for part in entry.field)
        return f"map<{key}, {value}>"
    name = _short(kind) if field.type_name else kind.removeprefix("TYPE_").lower()
    repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    return f"repeated {name}" if repeated else name
